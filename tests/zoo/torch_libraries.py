"""Networks of libraries on torch by both of its exporters: torch_geometric, norse, pytorch_tabnet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from .case import Case, Export
from .torch_exports import EXPORTERS, SCRIPT, export

Sizes = list[tuple[Any, ...]]
Make = Callable[[], tuple[Any, Sizes]]
"""A module and its arguments at two sizes."""


def _export(make: Make, exporter: str, folder: Path) -> Export:
    import torch

    torch.manual_seed(0)
    module, sizes = make()
    return export(module, sizes, folder, exporter)


def _graphs(layer: str, options: Mapping[str, Any], weighted: bool) -> tuple[Any, Sizes]:
    """Two layers of torch_geometric on random graphs: of 6 nodes and 11 edges, and of 9 and 20."""
    import torch
    from torch_geometric import nn

    kind = getattr(nn, layer)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            heads = options.get("heads", 1)
            self.first, self.second = kind(5, 8, **options), kind(8 * heads, 4, **options)

        def forward(self, x: Any, edges: Any, weights: Any = None) -> Any:
            more = () if weights is None else (weights,)
            return self.second(torch.relu(self.first(x, edges, *more)), edges, *more)

    def drawn(nodes: int, edges: int) -> tuple[Any, ...]:
        ends = torch.randint(0, nodes, (2, edges))
        return (torch.randn(nodes, 5), ends, *([torch.rand(edges)] if weighted else []))

    return Net(), [drawn(6, 11), drawn(9, 20)]


def _perceptrons(layer: str) -> tuple[Any, Sizes]:
    """Layers that take a network, and read-outs of whole graphs."""
    import torch
    from torch_geometric import nn

    def perceptron(inner: int) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(inner, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = (
                nn.EdgeConv(perceptron(10)) if layer == "EdgeConv" else nn.GINConv(perceptron(5), train_eps=True)
            )

        def forward(self, x: Any, edges: Any) -> Any:
            return self.layer(x, edges).mean(0)

    return Net(), [(torch.randn(n, 5), torch.randint(0, n, (2, m))) for n, m in ((6, 11), (9, 20))]


GRAPHS: Final[Mapping[str, tuple[str, Mapping[str, Any], bool]]] = {
    "GCN": ("GCNConv", {}, False),
    "GCN, weighted edges": ("GCNConv", {}, True),
    "GraphSAGE": ("SAGEConv", {}, False),
    "GraphSAGE, max": ("SAGEConv", {"aggr": "max"}, False),
    "GraphConv": ("GraphConv", {}, True),
    "GAT": ("GATConv", {"heads": 2}, False),
    "GAT v2": ("GATv2Conv", {"heads": 2}, False),
    "graph transformer": ("TransformerConv", {"heads": 2}, False),
    "TAG": ("TAGConv", {"K": 2}, False),
    "SGC": ("SGConv", {"K": 2}, False),
    "ARMA": ("ARMAConv", {}, False),
    "Chebyshev": ("ChebConv", {"K": 3}, False),
    "local extrema": ("LEConv", {}, False),
    "gated": ("ResGatedGraphConv", {}, False),
}


def _spikes(kind: str) -> tuple[Any, Sizes]:
    """A network of norse over five steps of time."""
    import norse.torch as norse
    import torch
    from norse.torch.functional.izhikevich import tonic_spiking

    cell = getattr(norse, kind)
    more = (tonic_spiking,) if kind == "IzhikevichCell" else ()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Linear(6, 8)
            self.cell = cell(8, 8) if "Recurrent" in kind else cell(*more)
            self.out, self.read = torch.nn.Linear(8, 3), norse.LICell()

        def forward(self, x: Any) -> Any:
            state, reading, y = None, None, None
            for step in range(5):
                spikes, state = self.cell(self.dense(x[step]), state)
                y, reading = self.read(self.out(spikes), reading)
            return y

    return Net(), [(20 * torch.randn(5, batch, 6),) for batch in (2, 3)]


SPIKING: Final = (
    *("LIFCell", "LIFRecurrentCell", "LSNNCell", "LSNNRecurrentCell", "LIFAdExCell", "LIFExCell", "IzhikevichCell"),
    *("LIFRefracCell", "LIFBoxCell", "IAFCell"),
)


def _tables(options: Mapping[str, Any]) -> tuple[Any, Sizes]:
    import torch
    from pytorch_tabnet.tab_network import TabNet

    groups = torch.eye(6)
    net = TabNet(6, 3, n_d=4, n_a=4, n_steps=2, group_attention_matrix=groups, **options)
    rows = []
    for batch in (4, 7):
        x = torch.randn(batch, 6)
        for at in options.get("cat_idxs", ()):
            x[:, at] = torch.randint(0, 3, (batch,)).float()
        rows.append((x,))
    return net, rows


TABLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sparsemax": {},
    "entmax": {"mask_type": "entmax"},
    "embeddings": {"cat_idxs": [1, 4], "cat_dims": [3, 3], "cat_emb_dim": [1, 1]},
    "independent layers": {"n_independent": 1, "n_shared": 1},
    "shared layers": {"n_independent": 0, "n_shared": 2},
}


REFUSED: Final = {
    "torch_geometric: GAT / torch.onnx dynamo": "GuardOnDataDependentSymNode: Could not guard on Eq(u0 + 6, 0)",
    "norse: IAFCell / torch.onnx script": "RuntimeError: Cannot insert a Tensor that requires grad",
    "norse: IzhikevichCell / torch.onnx script": "RuntimeError: Cannot insert a Tensor that requires grad",
    "pytorch_tabnet / torch.onnx dynamo": "PassError at SplitToSequence: 'NoneType' object has no attribute 'ndim'",
}
MAXIMUM: Final = "torch_geometric writes the max over neighbours for scripts as one that includes 0"
SURROGATE: Final = "norse trains spikes by a surrogate derivative, which files do not hold; that of the step is 0"
KNOWN: Final = {
    "torch_geometric: GraphSAGE, max / torch.onnx script": {"outputs": MAXIMUM, "grad": MAXIMUM},
    "torch_geometric: EdgeConv / torch.onnx script": {"outputs": MAXIMUM, "grad": MAXIMUM},
    **{f"norse: {name} / {exporter}": {"grad": SURROGATE} for name in SPIKING for exporter in EXPORTERS},
}


def library_cases(
    package: str,
    makes: Mapping[str, Make],
    known: Mapping[str, Mapping[str, str]],
    refused: Mapping[str, str],
    exporters: Sequence[str] = EXPORTERS,
    slope: float = 1e-4,
    needs: Sequence[str] = (),
) -> Iterator[Case]:
    """A case for each network and exporter of a package, which is the family; ``known`` and ``refused`` by its id."""
    for name, make in makes.items():
        for exporter in exporters:
            key = f"{package}: {name} / {exporter}"
            if key not in refused:
                make_file = partial(_export, make, exporter)
                yield Case(package, name, exporter, make_file, (package, *needs), slope=slope, known=known.get(key, {}))


_GRAPHS: Final = {
    **{name: partial(_graphs, *row) for name, row in GRAPHS.items()},
    **{name: partial(_perceptrons, name) for name in ("EdgeConv", "GINConv")},
}
_SPIKING: Final = {name: partial(_spikes, name) for name in SPIKING}
_TABLES: Final = {name: partial(_tables, row) for name, row in TABLES.items()}
CASES: Final[tuple[Case, ...]] = (
    *library_cases("torch_geometric", _GRAPHS, KNOWN, REFUSED),
    *library_cases("norse", _SPIKING, KNOWN, REFUSED),
    *library_cases("pytorch_tabnet", _TABLES, KNOWN, REFUSED, (SCRIPT,)),
)
