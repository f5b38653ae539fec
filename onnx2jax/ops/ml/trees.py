"""ai.onnx.ml tree ensembles: all rows descend all trees one level at a time, one gather per level."""

from __future__ import annotations

import operator
from inspect import Parameter
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from ..arrays import argmax, is_known, xp
from ..registry import deprecated, op, taking
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, repeat, transform, two_scores

Aggregate = Literal["AVERAGE", "SUM", "MIN", "MAX"]
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARE = operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne
NEQ, MEMBER, LEAF = (MODES.index(m) for m in ("BRANCH_NEQ", "BRANCH_MEMBER", "LEAF"))


class Votes(NamedTuple):
    """A forest and the votes of its leaves, parallel arrays of node, target and weight."""

    forest: Forest
    nodes: Any
    targets: Any
    weights: Any


class Forest(NamedTuple):
    """Parallel arrays, one entry per node; the children of a leaf are the leaf itself."""

    modes: Any
    features: Any
    splits: Any
    true: Any
    false: Any
    missing: Any
    """Whether NaN takes the true branch."""
    roots: Any
    """The root node of each tree."""
    members: Any = np.zeros((0, 0))
    """Per node the set tested by BRANCH_MEMBER, padded with NaN."""


class Layout(NamedTuple):
    """A forest laid out for descent: the roots first, then the children of each node next to each other.

    Each level gathers one word per row and tree, because gathers dominate the cost. From the lowest bit, a word
    contains the position of the true child (or of the leaf itself), the feature, the mode, whether NaN goes to the true
    child, and whether the node has children. float32 splits are the upper half of 64-bit words.
    """

    words: Any
    splits_in_words: bool
    members: Any
    modes: Any
    """The modes that occur."""
    shifts: tuple[int, int, int, int]
    """The first bit of each field of a word after the child."""
    missing: bool
    """Whether NaN goes to the true child of any node."""
    roots: Any
    """The positions of the roots."""
    depth: int
    n_features: int
    """The smallest number of input features."""
    fields: Any
    """The fields of the words and the splits as arrays, which NumPy reads faster than bits."""


def _depth(forest):
    """The length of the longest path from a root to a leaf."""
    level, depth = np.unique(forest.roots), 0
    while len(level := level[forest.modes[level] != LEAF]):
        level, depth = np.unique(np.concatenate([forest.true[level], forest.false[level]])), depth + 1
        if depth > len(forest.modes):
            raise ValueError("the nodes do not form trees: a branch leads back to a node above it")
    return depth


_MAX_COPIES = 16
"""Nodes shared by several branches are copied for each; the layout has at most this many times the nodes."""


def _layout(forest):
    """(layout, node at each position, tree at each position) of a forest."""
    depth, levels, firsts, end = _depth(forest), [forest.roots], [], len(forest.roots)
    trees = [np.arange(end)]
    for _ in range(depth + 1):
        inner = forest.modes[levels[-1]] != LEAF
        first = np.arange(end - len(inner), end)
        first[inner] = end + 2 * np.arange(inner.sum())
        firsts.append(first)
        level = levels[-1][inner]
        levels.append(np.stack([forest.true[level], forest.false[level]], -1).ravel())
        trees.append(np.repeat(trees[-1][inner], 2))
        end += len(levels[-1])
        if end > _MAX_COPIES * len(forest.modes):
            raise ValueError(f"the nodes do not form trees: {len(forest.modes)} nodes have more than {end} branches")
    at = np.concatenate(levels).astype(np.int64)
    modes, features, missing = forest.modes[at], forest.features[at], forest.missing[at].astype(bool)
    used = [m for m in np.unique(modes).tolist() if m != LEAF]
    if (least := features.min(initial=0)) < 0:
        raise ValueError(f"the trees use feature {least}, which is negative")
    most = int(features.max(initial=0))
    widths = (len(at).bit_length(), most.bit_length(), 3 if len(used) > 1 else 0, 1)
    shifts = tuple(np.cumsum(widths).tolist())
    words = np.zeros(len(at), np.uint64)
    fields = np.concatenate(firsts), features, modes if len(used) > 1 else 0 * modes, missing, modes != LEAF
    for field, shift in zip(fields, (0, *shifts), strict=True):
        words |= field.astype(np.uint64) << np.uint64(shift)
    fields = *(f.astype(t) for f, t in zip(fields, "iibbb", strict=True)), forest.splits[at]
    splits_in_words = shifts[-1] < 32 and forest.splits.dtype == np.float32
    if splits_in_words:
        words |= fields[-1].view(np.uint32).astype(np.uint64) << np.uint64(32)
    elif shifts[-1] < 32:
        words = words.astype(np.uint32)
    members = forest.members[at] if MEMBER in used else None
    roots = np.arange(len(forest.roots), dtype=np.uint32)
    nan_is_true = bool(missing.any())
    layout = Layout(words, splits_in_words, members, used, shifts, nan_is_true, roots, depth, most + 1, fields)
    return layout, at, np.concatenate(trees)


def _get(table, at):
    """Entries of a table at indices that are known to be in bounds."""
    return table[at] if is_known((table, at)) else jnp.asarray(table).at[at].get(mode="promise_in_bounds")


def _leaves(X, layout):
    """The position of the leaf that each row reaches in each tree: [N, trees]."""
    if layout.n_features > X.shape[1]:
        raise ValueError(f"the trees use feature {layout.n_features - 1}, but the input has {X.shape[1]} features")
    rows = xp(X).arange(X.shape[0], dtype=np.uint32)[:, None]  # unsigned, so that JAX does not test for negatives
    known = is_known(X)

    def field(words, k):
        if known:
            return layout.fields[k].take(words)
        first, last = (0, *layout.shifts)[k], (*layout.shifts, layout.shifts[-1] + 1)[k]
        return (words >> words.dtype.type(first) & words.dtype.type(2 ** (last - first) - 1)).astype(np.uint32)

    def test(mode, x, split, at):
        if mode == MEMBER:
            return (x[..., None] == _get(layout.members, at)).any(-1)
        return _COMPARE[mode](x, split)

    def descend(_, at):
        words = at if known else _get(layout.words, at)
        if layout.splits_in_words and not known:
            splits, words = (words >> np.uint64(32)).astype(np.uint32).view(np.float32), words.astype(np.uint32)
        else:
            splits = _get(layout.fields[-1], at)
        x, is_true = _get(X, (rows, field(words, 1))), False
        for mode in layout.modes:
            passed = test(mode, x, splits, at)
            is_true = passed if len(layout.modes) == 1 else xp.where(field(words, 2) == mode, passed, is_true)
        if layout.missing or NEQ in layout.modes:  # all other modes are false for NaN
            is_true = xp.where(x != x, field(words, 3) == 1, is_true)
        right = ~is_true & (field(words, 4) == 1)
        return (field(words, 0) + right.astype(np.uint32)).astype(np.uint32)

    return repeat(layout.depth, descend, xp(X).zeros(rows.shape, np.uint32) + layout.roots)


_AGGREGATE: dict[str, tuple] = {"MIN": (np.minimum, np.inf, xp.min), "MAX": (np.maximum, -np.inf, xp.max)}
_SUM: tuple = np.add, 0, xp.sum


class Tables(NamedTuple):
    """The votes of leaves by their positions in a layout.

    If each tree votes for one target, and equally many trees for each, the roots are sorted by target.
    """

    layout: Layout
    targets: Any
    """The targets that any leaf votes for."""
    weights: Any
    """The weight of a leaf for the target of its tree [positions], or for all targets [positions, targets]."""
    voted: Any
    """Likewise, whether it votes for the target; None if every row gets a vote for every target."""


def _tables(votes, n_targets, aggregate, dtype):
    """The Tables of a forest, its splits and weights in ``dtype``."""
    forest, nodes, targets, weights = votes
    if len(targets) and not 0 <= targets.min() <= targets.max() < n_targets:
        raise ValueError(f"target ids {sorted(set(targets.tolist()))} must be in [0, {n_targets - 1}]")
    forest = forest._replace(splits=forest.splits.astype(dtype), members=forest.members.astype(dtype))
    layout, at, trees = _layout(forest)
    used, columns = np.unique(targets, return_inverse=True)
    merge, neutral, _ = _AGGREGATE.get(aggregate, _SUM)
    table = np.full((len(forest.modes), len(used)), neutral, dtype)
    merge.at(table, (nodes, columns), weights.astype(dtype))
    voted = np.zeros(table.shape, bool)
    voted[nodes, columns] = True
    table, voted, leaves = table[at], voted[at], forest.modes[at] == LEAF
    any_leaf, all_leaves = np.zeros((len(layout.roots), len(used)), bool), np.ones((len(layout.roots), len(used)), bool)
    np.logical_or.at(any_leaf, trees[leaves], voted[leaves])
    np.logical_and.at(all_leaves, trees[leaves], voted[leaves])
    if (any_leaf.sum(1) == 1).all() and len(set(any_leaf.sum(0).tolist())) == 1:
        own = any_leaf.argmax(1)
        layout = layout._replace(roots=layout.roots[np.argsort(own, kind="stable")])
        table, voted = (np.take_along_axis(v, own[trees][:, None], 1)[:, 0] for v in (table, voted))
    return Tables(layout, used, table, None if all_leaves.any(0).all() else voted)


def _scores(X, once, n_targets, aggregate, votes):
    """(aggregated weights [N, targets], whether any leaf voted [N or 1, targets]).

    Computed in float64 if the input, the splits or the weights are float64.
    """
    dtype = np.float64 if np.float64 in (X.dtype, votes.forest.splits.dtype, votes.weights.dtype) else np.float32
    layout, used, weights, voted = once(_tables, votes, n_targets, aggregate, dtype=np.dtype(dtype))
    leaves = _leaves(X.astype(dtype), layout)

    def over_trees(reduce, table):
        values = _get(table, leaves)
        if table.ndim == 2:
            return reduce(values, axis=1)
        return reduce(values.reshape(-1, len(used), len(layout.roots) // len(used)), axis=2)

    scores = over_trees(_AGGREGATE.get(aggregate, _SUM)[2], weights)
    scores = scores / dtype(len(layout.roots)) if aggregate == "AVERAGE" else scores
    any_vote = np.ones((1, len(used)), bool) if voted is None else over_trees(xp.any, voted)
    if voted is not None:
        scores = xp.where(any_vote, scores, dtype(0))
    if len(used) == n_targets:
        return scores, any_vote
    if len(used) and used[-1] - used[0] + 1 == len(used):
        widths = (0, 0), (int(used[0]), n_targets - 1 - int(used[-1]))
        return xp.pad(scores, widths), xp.pad(any_vote, widths)
    columns = np.full(n_targets, len(used))
    columns[used] = np.arange(len(used))
    return tuple(xp.pad(v, ((0, 0), (0, 1)))[:, columns] for v in (scores, any_vote))


# ------------------------------------------------------------------------ TreeEnsemble{Regressor,Classifier}

_NODES = ("falsenodeids", "featureids", "modes", "nodeids", "treeids", "truenodeids")


def _schema(prefix):
    """The attributes of regressors (``prefix`` "target") and classifiers ("class")."""
    required = [f"nodes_{k}" for k in _NODES] + [f"{prefix}_{k}" for k in ("ids", "nodeids", "treeids")]
    floats = ["base_values", "nodes_hitrates", "nodes_values", f"{prefix}_weights"]
    optional = [*floats, *(f"{k}_as_tensor" for k in floats), "nodes_missing_value_tracks_true"]
    return dict.fromkeys(required, Parameter.empty) | dict.fromkeys(optional)


def _floats(name, attributes):
    """An attribute of floats, or its ``_as_tensor`` variant (float64), as a vector."""
    floats, tensor = attributes[name], attributes[f"{name}_as_tensor"]
    if tensor is not None and floats:
        raise ValueError(f"{name} and {name}_as_tensor must not both be given")
    return np.array(floats or (), np.float32) if tensor is None else tensor.reshape(-1)


def _votes_by_id(prefix, attributes):
    """The Votes of versions 1 to 4, whose nodes are identified by tree id and node id; hit rates are ignored."""
    splits = _floats("nodes_values", attributes)
    missing = attributes["nodes_missing_value_tracks_true"] or (0,) * len(splits)
    false, features, modes, nodes, trees, true = (attributes[f"nodes_{k}"] for k in _NODES)
    if unknown := set(modes) - {*MODES} | {MODES[MEMBER]}.intersection(modes):
        raise ValueError(f"nodes_modes {sorted(unknown)} must be among {MODES} (BRANCH_MEMBER in TreeEnsemble only)")
    if len({len(v) for v in (trees, nodes, true, false, modes, missing, features, splits)}) != 1:
        raise ValueError("the attributes nodes_* must all have the same length")
    trees, nodes, true, false = (np.array(v, np.int64) for v in (trees, nodes, true, false))
    span = max(v.max(initial=0) for v in (nodes, true, false)) + 1
    keys = trees * span + nodes
    order = np.argsort(keys, kind="stable")

    def find(trees, ids):
        at = order[np.searchsorted(keys, trees * span + ids, sorter=order).clip(max=len(order) - 1)]
        if (wrong := keys[at] != trees * span + ids).any():
            raise ValueError(f"no node has tree id {trees[wrong][0]} and node id {ids[wrong][0]}")
        return at

    modes, index = np.array([MODES.index(m) for m in modes]), np.arange(len(nodes))
    inner = modes != LEAF
    true, false = (np.where(inner, find(trees, np.where(inner, ids, nodes)), index) for ids in (true, false))
    roots = np.setdiff1d(index, np.concatenate([true[inner], false[inner]]))
    if len(roots) != len(np.unique(trees)):
        raise ValueError(f"{len(np.unique(trees))} trees have {len(roots)} roots")
    forest = Forest(modes, np.where(inner, features, 0), splits, true, false, np.array(missing, bool), roots)
    voters, ids, targets = (np.array(attributes[f"{prefix}_{k}"], np.int64) for k in ("treeids", "nodeids", "ids"))
    return Votes(forest, find(voters, ids), targets, _floats(f"{prefix}_weights", attributes))


def _add_base(scores, any_vote, base):
    """(scores plus base values, whether any leaf or base value contributes)."""
    if len(base) not in (0, scores.shape[1]):
        raise ValueError(f"base_values must have 0 or {scores.shape[1]} entries, one per score (it has {len(base)})")
    return (scores + base.astype(scores.dtype), True) if len(base) else (scores, any_vote)


@op("TreeEnsembleRegressor", domain=DOMAIN, heavy=True)
@taking(**_schema("target"))
def tree_ensemble_regressor(
    X, *, aggregate_function: Aggregate = "SUM", n_targets, once, post_transform: Transform = "NONE", **attributes
):
    """TreeEnsembleRegressor: aggregated leaf weights plus base values [N, targets]."""
    votes = once(_votes_by_id, "target", attributes)
    scores, any_vote = _scores(batch(X), once, n_targets, aggregate_function, votes)
    scores, _ = _add_base(scores, any_vote, once(_floats, "base_values", attributes))
    return transform(scores, post_transform).astype(np.float32)


_BASES = f"{LABELS}; one score per row with several base_values is unsupported"


@op("TreeEnsembleClassifier", domain=DOMAIN, heavy=True, limits=_BASES)
@taking(**_schema("class"))
def tree_ensemble_classifier(
    X, *, classlabels_int64s=None, classlabels_strings=None, once, post_transform: Transform = "NONE", **attributes
):
    """TreeEnsembleClassifier: (best class, scores)."""
    labels = once(class_labels, {"classlabels_int64s": classlabels_int64s, "classlabels_strings": classlabels_strings})
    votes = once(_votes_by_id, "class", attributes)
    scores, any_vote = _scores(batch(X), once, len(labels), "SUM", votes)
    base = once(_floats, "base_values", attributes)
    voted, margin = once(_single_class, votes)
    if len(labels) == 2 and voted is not None:
        index, scores = _binary(scores, base, voted, post_transform, margin=margin)
    else:
        scores, any_vote = _add_base(scores, any_vote, base)
        index, scores = argmax(xp.where(any_vote, scores, -np.inf), 1), transform(scores, post_transform)
    return labels_of(labels, index), scores.astype(np.float32)


def _single_class(votes):
    """(the only class that any leaf votes for, or None; whether any weight is negative)."""
    return votes.targets[0] if len(set(votes.targets)) == 1 else None, bool((votes.weights < 0).any())


def _binary(scores, base, voted, post_transform, *, margin):
    """(class, scores) of two classes if all votes are for one: its score is a `margin`, or else a probability.

    By the converters' convention, votes for class 0 mean class 1, and votes for class 1 mean class 1.
    """
    if len(base) > 1 - voted:
        raise ValueError(f"{len(base)} base_values are ambiguous when all votes are for class {voted} of two")
    score = scores[:, voted : voted + 1] + (base.astype(scores.dtype) if len(base) else 0)
    index = (score[:, 0] > (0 if margin else 0.5)).astype(np.int64)
    return index, transform(scores, post_transform) if voted else two_scores(score, post_transform, margin=margin)


for _name in ("TreeEnsembleRegressor", "TreeEnsembleClassifier"):
    deprecated(_name, domain=DOMAIN, since=5, instead="TreeEnsemble")


# ---------------------------------------------------------------------------------------------- TreeEnsemble


def _member_sets(values, modes):
    """The sets of BRANCH_MEMBER nodes, one row per node, padded with NaN (which also separates them in ``values``)."""
    where = np.flatnonzero(modes == MEMBER)
    sets = [s for s in np.split(values, np.flatnonzero(np.isnan(values)) + 1) if len(s)]
    if len(sets) != len(where):
        raise ValueError(f"membership_values has {len(sets)} sets for {len(where)} BRANCH_MEMBER nodes")
    rows = np.full((len(modes), max(map(len, sets), default=0)), np.nan, values.dtype)
    for node, members in zip(where, sets, strict=True):
        rows[node, : len(members)] = members
    return rows


def _votes_by_index(attributes):
    """The Votes of version 5, which stores branches and leaves separately; the leaves are appended to the branches."""
    splits, weights, modes = attributes["nodes_splits"], attributes["leaf_weights"], attributes["nodes_modes"]
    inner, n_leaves = len(splits), len(weights)
    leaves = np.arange(inner, inner + n_leaves)

    def extended(values, leaf=0):
        return np.pad(values, (0, n_leaves), constant_values=leaf)

    def children(side):
        ids, leafs = attributes[f"nodes_{side}nodeids"], attributes[f"nodes_{side}leafs"]
        return np.append(np.array(ids) + inner * np.array(leafs), leaves)

    missing = extended(attributes["nodes_missing_value_tracks_true"] or np.zeros(inner))
    modes, values = extended(modes, LEAF), attributes["membership_values"]
    members = _member_sets(np.zeros(0) if values is None else values, modes)
    features, roots = extended(attributes["nodes_featureids"]), np.array(attributes["tree_roots"])
    forest = Forest(modes, features, extended(splits), children("true"), children("false"), missing, roots, members)
    return Votes(forest, leaves, np.array(attributes["leaf_targetids"]), weights)


_REQUIRED = (
    "leaf_targetids", "leaf_weights", "nodes_falseleafs", "nodes_falsenodeids", "nodes_featureids", "nodes_modes",
    "nodes_splits", "nodes_trueleafs", "nodes_truenodeids", "tree_roots",
)  # fmt: skip
# Hit rates are hints for memory layout, and are ignored.
_OPTIONAL = ("membership_values", "nodes_hitrates", "nodes_missing_value_tracks_true")


@op("TreeEnsemble", domain=DOMAIN, since=5, heavy=True)
@taking(**dict.fromkeys(_REQUIRED, Parameter.empty), **dict.fromkeys(_OPTIONAL))
def tree_ensemble(
    X, *, aggregate_function: Literal[0, 1, 2, 3] = 1, n_targets, once, post_transform: Literal[0, 1, 2, 3, 4] = 0,
    **attributes,
):  # fmt: skip
    """TreeEnsemble: aggregated leaf weights of trees whose nodes may test set membership."""
    aggregate = get_args(Aggregate)[aggregate_function]
    scores, _ = _scores(batch(X), once, n_targets, aggregate, once(_votes_by_index, attributes))
    return transform(scores, get_args(Transform)[post_transform]).astype(X.dtype)
