"""ai.onnx.ml tree ensembles: all trees of all rows go down one level at a time, one gather a node."""

from __future__ import annotations

import operator
from inspect import Parameter
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from ..arrays import argmax, is_known, xp
from ..registry import op, taking, withdrawn
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, repeat, transform, two_scores

Aggregate = Literal["AVERAGE", "SUM", "MIN", "MAX"]
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARE = operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne
NEQ, MEMBER, LEAF = (MODES.index(m) for m in ("BRANCH_NEQ", "BRANCH_MEMBER", "LEAF"))


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


class Walk(NamedTuple):
    """A forest laid out for walking: the trees' roots first, then the children of each node side by side.

    Each step gathers one word, for gathers are what a step costs. Of a word's bits the lowest are the place of the true
    child, or of the leaf itself; then come the feature, the mode, whether NaN goes to the true child, and whether the
    node has children. Splits in float32 are the upper half of words of 64 bits.
    """

    words: Any
    packed: bool
    """Whether splits are part of the words."""
    members: Any
    modes: Any
    """Those that occur."""
    shifts: tuple[int, int, int, int]
    """Where in a word the other fields begin."""
    missing: bool
    """Whether NaN ever goes to the true child."""
    roots: Any
    """The places where the trees begin."""
    depth: int
    n_features: int
    """The least that the input must have."""
    fields: Any
    """The fields of the words and the splits as arrays, which NumPy reads sooner than bits."""


def _depth(forest):
    """The longest way from a root to a leaf."""
    level, depth = np.unique(forest.roots), 0
    while len(level := level[forest.modes[level] != LEAF]):
        level, depth = np.unique(np.concatenate([forest.true[level], forest.false[level]])), depth + 1
        if depth > len(forest.modes):
            raise ValueError("the nodes do not form trees: a branch leads back to a node above it")
    return depth


_MOST_SHARED = 16
"""Nodes that several branches lead to are laid out for each of them; so many times as many as there are in all."""


def _walk(forest):
    """The forest for walking; which node is at each of its places, and in which tree."""
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
        if end > _MOST_SHARED * len(forest.modes):
            raise ValueError(f"the nodes do not form trees: {len(forest.modes)} nodes share more than {end} branches")
    at = np.concatenate(levels).astype(np.int64)
    modes, features, missing = forest.modes[at], forest.features[at], forest.missing[at].astype(bool)
    used = [m for m in np.unique(modes).tolist() if m != LEAF]
    if (least := features.min(initial=0)) < 0:
        raise ValueError(f"the trees ask for feature {least}")
    most = int(features.max(initial=0))
    widths = (len(at).bit_length(), most.bit_length(), 3 if len(used) > 1 else 0, 1)
    shifts = tuple(np.cumsum(widths).tolist())
    words = np.zeros(len(at), np.uint64)
    fields = np.concatenate(firsts), features, modes if len(used) > 1 else 0 * modes, missing, modes != LEAF
    for field, shift in zip(fields, (0, *shifts), strict=True):
        words |= field.astype(np.uint64) << np.uint64(shift)
    fields = *(f.astype(t) for f, t in zip(fields, "iibbb", strict=True)), forest.splits[at]
    packed = shifts[-1] < 32 and forest.splits.dtype == np.float32
    if packed:
        words |= fields[-1].view(np.uint32).astype(np.uint64) << np.uint64(32)
    elif shifts[-1] < 32:
        words = words.astype(np.uint32)
    members = forest.members[at] if MEMBER in used else None
    roots = np.arange(len(forest.roots), dtype=np.uint32)
    walk = Walk(words, packed, members, used, shifts, bool(missing.any()), roots, depth, most + 1, fields)
    return walk, at, np.concatenate(trees)


def _get(table, at):
    """Entries of a table by indices that lie inside it."""
    return table[at] if is_known((table, at)) else jnp.asarray(table).at[at].get(mode="promise_in_bounds")


def _leaves(X, walk):
    """The place where each row ends in each tree: [N, trees]."""
    if walk.n_features > X.shape[1]:
        raise ValueError(f"the trees ask for feature {walk.n_features - 1}, the input has {X.shape[1]}")
    rows = xp(X).arange(X.shape[0], dtype=np.uint32)[:, None]  # unsigned indices are not looked at for a sign
    known = is_known(X)

    def field(words, k):
        if known:
            return walk.fields[k].take(words)
        first, last = (0, *walk.shifts)[k], (*walk.shifts, walk.shifts[-1] + 1)[k]
        return (words >> words.dtype.type(first) & words.dtype.type(2 ** (last - first) - 1)).astype(np.uint32)

    def test(mode, x, split, at):
        if mode == MEMBER:
            return (x[..., None] == _get(walk.members, at)).any(-1)
        return _COMPARE[mode](x, split)

    def down(_, at):
        words = at if known else _get(walk.words, at)
        if walk.packed and not known:
            splits, words = (words >> np.uint64(32)).astype(np.uint32).view(np.float32), words.astype(np.uint32)
        else:
            splits = _get(walk.fields[-1], at)
        x, go = _get(X, (rows, field(words, 1))), False
        for mode in walk.modes:
            passed = test(mode, x, splits, at)
            go = passed if len(walk.modes) == 1 else xp.where(field(words, 2) == mode, passed, go)
        if walk.missing or NEQ in walk.modes:  # all others are false for NaN by themselves
            go = xp.where(x != x, field(words, 3) == 1, go)
        right = ~go & (field(words, 4) == 1)
        return (field(words, 0) + right.astype(np.uint32)).astype(np.uint32)

    return repeat(walk.depth, down, xp(X).zeros(rows.shape, np.uint32) + walk.roots)


_AGGREGATE: dict[str, tuple] = {"MIN": (np.minimum, np.inf, xp.min), "MAX": (np.maximum, -np.inf, xp.max)}
_ADDED: tuple = np.add, 0, xp.sum


class Tables(NamedTuple):
    """What leaves say, by their places in a walk.

    Where each tree votes for one target, and as many for each, the roots stand in the order of these targets.
    """

    walk: Walk
    heard: Any
    """The targets that any leaf votes for."""
    weights: Any
    """What a leaf adds to the target of its tree [places], or to all that are heard [places, heard]."""
    voted: Any
    """Likewise, whether it has something to say; None where each row hears something of every one of them."""


def _tables(votes, n_targets, aggregate, dtype):
    """The forest with splits in this type, and what its leaves say."""
    forest, nodes, targets, weights = votes
    if len(targets) and not 0 <= targets.min() <= targets.max() < n_targets:
        raise ValueError(f"the target ids {sorted(set(targets.tolist()))} leave the {n_targets} targets or classes")
    forest = forest._replace(splits=forest.splits.astype(dtype), members=forest.members.astype(dtype))
    walk, at, trees = _walk(forest)
    heard, columns = np.unique(targets, return_inverse=True)
    merge, neutral, _ = _AGGREGATE.get(aggregate, _ADDED)
    table = np.full((len(forest.modes), len(heard)), neutral, dtype)
    merge.at(table, (nodes, columns), weights.astype(dtype))
    voted = np.zeros(table.shape, bool)
    voted[nodes, columns] = True
    table, voted, leaves = table[at], voted[at], forest.modes[at] == LEAF
    some, every = np.zeros((len(walk.roots), len(heard)), bool), np.ones((len(walk.roots), len(heard)), bool)
    np.logical_or.at(some, trees[leaves], voted[leaves])
    np.logical_and.at(every, trees[leaves], voted[leaves])
    if (some.sum(1) == 1).all() and len(set(some.sum(0).tolist())) == 1:
        own = some.argmax(1)
        walk = walk._replace(roots=walk.roots[np.argsort(own, kind="stable")])
        table, voted = (np.take_along_axis(v, own[trees][:, None], 1)[:, 0] for v in (table, voted))
    return Tables(walk, heard, table, None if every.any(0).all() else voted)


def _scores(X, once, n_targets, aggregate, votes):
    """The aggregated weights [N, targets], and where any leaf had something to say.

    All is compared and summed in doubles where the input, the splits or the weights are doubles.
    """
    dtype = np.float64 if np.float64 in (X.dtype, votes.forest.splits.dtype, votes.weights.dtype) else np.float32
    walk, heard, weights, voted = once(_tables, votes, n_targets, aggregate, dtype=np.dtype(dtype))
    places = _leaves(X.astype(dtype), walk)

    def over_trees(reduce, table):
        found = _get(table, places)
        if table.ndim == 2:
            return reduce(found, axis=1)
        return reduce(found.reshape(-1, len(heard), len(walk.roots) // len(heard)), axis=2)

    scores = over_trees(_AGGREGATE.get(aggregate, _ADDED)[2], weights)
    scores = scores / dtype(len(walk.roots)) if aggregate == "AVERAGE" else scores
    has = np.ones((1, len(heard)), bool) if voted is None else over_trees(xp.any, voted)
    if voted is not None:
        scores = xp.where(has, scores, dtype(0))
    if len(heard) == n_targets:
        return scores, has
    if len(heard) and heard[-1] - heard[0] + 1 == len(heard):
        sides = (0, 0), (int(heard[0]), n_targets - 1 - int(heard[-1]))
        return xp.pad(scores, sides), xp.pad(has, sides)
    columns = np.full(n_targets, len(heard))
    columns[heard] = np.arange(len(heard))
    return tuple(xp.pad(v, ((0, 0), (0, 1)))[:, columns] for v in (scores, has))


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
    labels = once(class_labels, {"classlabels_int64s": classlabels_int64s, "classlabels_strings": classlabels_strings})
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
