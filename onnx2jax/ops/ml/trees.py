"""ai.onnx.ml tree ensembles: all trees of all rows go down one level at a time, by gathers over arrays of nodes."""

from __future__ import annotations

import operator
from inspect import Parameter
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from ..arrays import argmax, is_known, xp
from ..registry import op, taking, withdrawn
from .scores import DOMAIN, LABELS, Transform, batch, labels_of, only, repeat, transform, two_scores

Aggregate = Literal["AVERAGE", "SUM", "MIN", "MAX"]
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARE = operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne
LEAF, MEMBER = MODES.index("LEAF"), MODES.index("BRANCH_MEMBER")


class Votes(NamedTuple):
    """A forest, and what its leaves say: a node, a target and a weight each."""

    forest: Forest
    nodes: Any
    targets: Any
    weights: Any


class Forest(NamedTuple):
    """Parallel arrays, one entry for each node; the children of a leaf are the leaf itself."""

    modes: Any
    features: Any
    splits: Any
    true: Any
    false: Any
    missing: Any
    """Whether NaN takes the true branch."""
    roots: Any
    """The root of each tree."""
    members: Any = np.zeros((0, 0))
    """For each node the set a BRANCH_MEMBER node tests, filled up with NaN."""


def _depth(forest):
    """The longest way from a root to a leaf."""
    level, depth = np.unique(forest.roots), 0
    while len(level := level[forest.modes[level] != LEAF]):
        level, depth = np.unique(np.concatenate([forest.true[level], forest.false[level]])), depth + 1
        if depth > len(forest.modes):
            raise ValueError("the nodes do not form trees: a branch leads back to a node above it")
    return depth


def _get(table, at):
    """Entries of a table by indices that lie inside it."""
    return table[at] if is_known((table, at)) else jnp.asarray(table).at[at].get(mode="promise_in_bounds")


def _ways(forest):
    """What leads from a node to the next as one table [nodes, 5], the modes that occur, the depth, the last feature."""
    # One gather for all that is integer, since each costs alike.
    links = np.stack([forest.features, forest.true, forest.false, forest.missing, forest.modes], -1).astype(np.int32)
    return (
        links,
        [m for m in np.unique(forest.modes).tolist() if m != LEAF],
        _depth(forest),
        int(forest.features.max(initial=0)),
    )


def _leaves(forest, X, links, used, depth, most):
    """The node where each row ends in each tree: [N, trees]."""
    if most >= X.shape[1]:
        raise ValueError(f"the trees ask for feature {most}, the input has {X.shape[1]}")
    rows = xp(X).arange(X.shape[0])[:, None]

    def test(mode, x, at):
        if mode == MEMBER:
            return (x[..., None] == _get(forest.members, at)).any(-1)
        return _COMPARE[mode](x, _get(forest.splits, at))

    def down(_, at):
        feature, true, false, missing, modes = xp.moveaxis(_get(links, at), -1, 0)
        x, go = _get(X, (rows, feature)), False
        for mode in used:
            go = test(mode, x, at) if len(used) == 1 else xp.where(modes == mode, test(mode, x, at), go)
        return xp.where(xp.where(x != x, missing == 1, go), true, false)

    start = xp(X).broadcast_to(forest.roots.astype(np.int32), (X.shape[0], len(forest.roots)))
    return repeat(depth, down, start)


_AGGREGATE: dict[str, tuple] = {"MIN": (np.minimum, np.inf, xp.min), "MAX": (np.maximum, -np.inf, xp.max)}
_ADDED: tuple = np.add, 0, xp.sum


def _tables(votes, n_targets, aggregate, dtype):
    """The forest with splits in this type, a table [nodes, targets] of what they add, where they vote, and the ways."""
    forest, nodes, targets, weights = votes
    if len(targets) and not 0 <= targets.min() <= targets.max() < n_targets:
        raise ValueError(f"the target ids {sorted(set(targets.tolist()))} leave the {n_targets} targets or classes")
    merge, neutral, _ = _AGGREGATE.get(aggregate, _ADDED)
    table = np.full((len(forest.modes), n_targets), neutral, dtype)
    merge.at(table, (nodes, targets), weights.astype(dtype))
    voted = np.zeros(table.shape, bool)
    voted[nodes, targets] = True
    forest = forest._replace(splits=forest.splits.astype(dtype), members=forest.members.astype(dtype))
    return forest, table, voted, _ways(forest)


def _scores(X, once, n_targets, aggregate, votes):
    """The aggregated weights [N, targets], and where any leaf had something to say.

    All is compared and summed in doubles where the input, the splits or the weights are doubles.
    """
    dtype = np.float64 if np.float64 in (X.dtype, votes.forest.splits.dtype, votes.weights.dtype) else np.float32
    forest, table, voted, ways = once(_tables, votes, n_targets, aggregate, dtype=np.dtype(dtype))
    leaves = _leaves(forest, X.astype(dtype), *ways)
    total = _AGGREGATE.get(aggregate, _ADDED)[2]
    scores, has = total(_get(table, leaves), axis=1), _get(voted, leaves).any(1)
    scores = scores / len(forest.roots) if aggregate == "AVERAGE" else scores
    return xp.where(has, scores, dtype(0)), has


# ------------------------------------------------------------------------ TreeEnsemble{Regressor,Classifier}

_NODES = ("falsenodeids", "featureids", "modes", "nodeids", "treeids", "truenodeids")


def _schema(voting):
    """The attributes of regressors and classifiers; the names of what says how leaves vote begin with ``voting``."""
    required = [f"nodes_{k}" for k in _NODES] + [f"{voting}_{k}" for k in ("ids", "nodeids", "treeids")]
    reals = ["base_values", "nodes_hitrates", "nodes_values", f"{voting}_weights"]
    optional = [*reals, *(f"{k}_as_tensor" for k in reals), "nodes_missing_value_tracks_true"]
    return dict.fromkeys(required, Parameter.empty) | dict.fromkeys(optional)


def _reals(name, given):
    """An attribute that may come as a tensor of doubles instead."""
    floats, tensor = given[name], given[f"{name}_as_tensor"]
    if tensor is not None and floats:
        raise ValueError(f"{name} and {name}_as_tensor must not both be given")
    return np.array(floats or (), np.float32) if tensor is None else tensor.reshape(-1)


def _linked(voting, given):
    """The forest and its votes of versions 1 to 4, whose nodes are named by a tree id and a node id.

    The hit rates, which only help to lay out memory, are not looked at.
    """
    splits = _reals("nodes_values", given)
    missing = given["nodes_missing_value_tracks_true"] or (0,) * len(splits)
    false, features, modes, nodes, trees, true = (given[f"nodes_{k}"] for k in _NODES)
    if unknown := set(modes) - {*MODES} | {MODES[MEMBER]}.intersection(modes):
        raise ValueError(f"nodes_modes holds {sorted(unknown)}; there are {MODES}, the members in TreeEnsemble only")
    if len({len(v) for v in (trees, nodes, true, false, modes, missing, features, splits)}) != 1:
        raise ValueError("the attributes nodes_* must all have the same length")
    trees, nodes, true, false = (np.array(v, np.int64) for v in (trees, nodes, true, false))
    span = max(v.max(initial=0) for v in (nodes, true, false)) + 1
    keys = trees * span + nodes
    order = np.argsort(keys, kind="stable")

    def find(trees, ids):
        at = order[np.searchsorted(keys, trees * span + ids, sorter=order).clip(max=len(order) - 1)]
        if (wrong := keys[at] != trees * span + ids).any():
            raise ValueError(f"no node has the tree id {trees[wrong][0]} and the node id {ids[wrong][0]}")
        return at

    modes, here = np.array([MODES.index(m) for m in modes]), np.arange(len(nodes))
    inner = modes != LEAF
    true, false = (np.where(inner, find(trees, np.where(inner, ids, nodes)), here) for ids in (true, false))
    roots = np.setdiff1d(here, np.concatenate([true[inner], false[inner]]))
    if len(roots) != len(np.unique(trees)):
        raise ValueError(f"{len(np.unique(trees))} trees have {len(roots)} roots")
    forest = Forest(modes, np.where(inner, features, 0), splits, true, false, np.array(missing, bool), roots)
    voters, ids, targets = (np.array(given[f"{voting}_{k}"], np.int64) for k in ("treeids", "nodeids", "ids"))
    return Votes(forest, find(voters, ids), targets, _reals(f"{voting}_weights", given))


def _based(scores, has, base):
    """The scores plus the base values, which every row has."""
    if len(base) not in (0, scores.shape[1]):
        raise ValueError(f"base_values must be none or one for each of {scores.shape[1]} scores (got {len(base)})")
    return (scores + base.astype(scores.dtype), True) if len(base) else (scores, has)


@op("TreeEnsembleRegressor", domain=DOMAIN, heavy=True)
@taking(**_schema("target"))
def tree_ensemble_regressor(
    X, *, aggregate_function: Aggregate = "SUM", n_targets, once, post_transform: Transform = "NONE", **given
):
    """TreeEnsembleRegressor: the aggregated leaves, plus the base values."""
    scores, has = _scores(batch(X), once, n_targets, aggregate_function, once(_linked, "target", given))
    scores, _ = _based(scores, has, once(_reals, "base_values", given))
    return transform(scores, post_transform).astype(np.float32)


_BASES = f"{LABELS}; one score a row against several base_values is refused"


@op("TreeEnsembleClassifier", domain=DOMAIN, heavy=True, limits=_BASES)
@taking(**_schema("class"))
def tree_ensemble_classifier(
    X, *, classlabels_int64s=None, classlabels_strings=None, once, post_transform: Transform = "NONE", **given
):
    """TreeEnsembleClassifier: the best class and the scores."""
    _, labels = only(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    votes = once(_linked, "class", given)
    scores, has = _scores(batch(X), once, len(labels), "SUM", votes)
    base = once(_reals, "base_values", given)
    voted, mixed = once(_voting, votes)
    if len(labels) == 2 and voted is not None:
        index, scores = _binary(scores, base, voted, post_transform, mixed=mixed)
    else:
        scores, has = _based(scores, has, base)
        index, scores = argmax(xp.where(has, scores, -np.inf), 1), transform(scores, post_transform)
    return labels_of(labels, index), scores.astype(np.float32)


def _voting(votes):
    """The only class that any leaf votes for, or None, and whether weights are negative."""
    return votes.targets[0] if len(set(votes.targets)) == 1 else None, bool((votes.weights < 0).any())


def _binary(scores, base, voted, post_transform, *, mixed):
    """Two classes, and votes for only one of them: a probability, or a margin when votes of both signs are `mixed`.

    By convention of the converters votes for class 0 mean class 1, unlike votes for class 1.
    """
    if len(base) > 1 - voted:
        raise ValueError(f"{len(base)} base_values are ambiguous when all votes are for class {voted} of two")
    score = scores[:, voted : voted + 1] + (base.astype(scores.dtype) if len(base) else 0)
    index = (score[:, 0] > (0 if mixed else 0.5)).astype(np.int64)
    return index, transform(scores, post_transform) if voted else two_scores(score, post_transform, mixed=mixed)


for _name in ("TreeEnsembleRegressor", "TreeEnsembleClassifier"):
    withdrawn(_name, domain=DOMAIN, since=5, instead="TreeEnsemble")


# ---------------------------------------------------------------------------------------------- TreeEnsemble


def _member_sets(values, modes):
    """The sets of the BRANCH_MEMBER nodes, one row for each node, filled up with NaN, which also ends a set."""
    where = np.flatnonzero(modes == MEMBER)
    sets = [s for s in np.split(values, np.flatnonzero(np.isnan(values)) + 1) if len(s)]
    if len(sets) != len(where):
        raise ValueError(f"membership_values holds {len(sets)} sets for {len(where)} BRANCH_MEMBER nodes")
    rows = np.full((len(modes), max(map(len, sets), default=0)), np.nan, values.dtype)
    for node, members in zip(where, sets, strict=True):
        rows[node, : len(members)] = members
    return rows


def _joined(given):
    """The forest and its votes of version 5: branches and leaves in separate arrays; here the leaves follow."""
    splits, weights, modes = given["nodes_splits"], given["leaf_weights"], given["nodes_modes"]
    inner, n_leaves = len(splits), len(weights)
    leaves = np.arange(inner, inner + n_leaves)

    def extended(values, leaf=0):
        return np.pad(values, (0, n_leaves), constant_values=leaf)

    def children(side):
        ids, leafs = given[f"nodes_{side}nodeids"], given[f"nodes_{side}leafs"]
        return np.append(np.array(ids) + inner * np.array(leafs), leaves)

    modes, missing = extended(modes, LEAF), extended(given["nodes_missing_value_tracks_true"] or np.zeros(inner))
    values = given["membership_values"]
    members = _member_sets(np.zeros(0) if values is None else values, modes)
    features, roots = extended(given["nodes_featureids"]), np.array(given["tree_roots"])
    forest = Forest(modes, features, extended(splits), children("true"), children("false"), missing, roots, members)
    return Votes(forest, leaves, np.array(given["leaf_targetids"]), weights)


_REQUIRED = (
    "leaf_targetids", "leaf_weights", "nodes_falseleafs", "nodes_falsenodeids", "nodes_featureids", "nodes_modes",
    "nodes_splits", "nodes_trueleafs", "nodes_truenodeids", "tree_roots",
)  # fmt: skip
# The hit rates only help to lay out memory.
_OPTIONAL = ("membership_values", "nodes_hitrates", "nodes_missing_value_tracks_true")


@op("TreeEnsemble", domain=DOMAIN, since=5, heavy=True)
@taking(**dict.fromkeys(_REQUIRED, Parameter.empty), **dict.fromkeys(_OPTIONAL))
def tree_ensemble(
    X, *, aggregate_function: Literal[0, 1, 2, 3] = 1, n_targets, once, post_transform: Literal[0, 1, 2, 3, 4] = 0,
    **given,
):  # fmt: skip
    """TreeEnsemble: the aggregated leaves of trees whose nodes may test for membership of a set."""
    aggregate = get_args(Aggregate)[aggregate_function]
    scores, _ = _scores(batch(X), once, n_targets, aggregate, once(_joined, given))
    return transform(scores, get_args(Transform)[post_transform]).astype(X.dtype)
