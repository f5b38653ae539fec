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
    """What leads from a node to the next as one table [nodes, 5], the modes that occur, and the depth."""
    # One gather for all that is integer, since each costs alike.
    links = np.stack([forest.features, forest.true, forest.false, forest.missing, forest.modes], -1).astype(np.int32)
    return links, [m for m in np.unique(forest.modes).tolist() if m != LEAF], _depth(forest)


def _leaves(forest, X, once):
    """The node where each row ends in each tree: [N, trees]."""
    if int(forest.features.max(initial=0)) >= X.shape[1]:
        raise ValueError(f"the trees ask for feature {forest.features.max()}, the input has {X.shape[1]}")
    links, used, depth = once(_ways, forest)
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


def _scores(X, once, n_targets, aggregate, forest, nodes, targets, weights):
    """The aggregated weights [N, targets], and where any leaf had something to say.

    A vote is a node, a target and a weight. All is compared and summed in doubles where the input, the splits or the
    weights are doubles.
    """
    if len(targets) and not 0 <= targets.min() <= targets.max() < n_targets:
        raise ValueError(f"the target ids {sorted(set(targets.tolist()))} leave the {n_targets} targets or classes")
    width = np.float64 if np.float64 in (X.dtype, forest.splits.dtype, weights.dtype) else np.float32
    merge, neutral, total = _AGGREGATE.get(aggregate, (np.add, 0, xp.sum))
    table = np.full((len(forest.modes), n_targets), neutral, width)
    merge.at(table, (nodes, targets), weights.astype(width))
    voted = np.zeros(table.shape, bool)
    voted[nodes, targets] = True
    splits, members = forest.splits.astype(width), forest.members.astype(width)
    leaves = _leaves(forest._replace(splits=splits, members=members), X.astype(width), once)
    scores, has = total(_get(table, leaves), axis=1), _get(voted, leaves).any(1)
    scores = scores / len(forest.roots) if aggregate == "AVERAGE" else scores
    return xp.where(has, scores, width(0)), has


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
    return forest, find(voters, ids), targets, _reals(f"{voting}_weights", given)


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
    scores, has = _scores(batch(X), once, n_targets, aggregate_function, *once(_linked, "target", given))
    scores, _ = _based(scores, has, _reals("base_values", given))
    return transform(scores, post_transform).astype(np.float32)


_BASES = f"{LABELS}; one score a row against several base_values is refused"


@op("TreeEnsembleClassifier", domain=DOMAIN, heavy=True, limits=_BASES)
@taking(**_schema("class"))
def tree_ensemble_classifier(
    X, *, classlabels_int64s=None, classlabels_strings=None, once, post_transform: Transform = "NONE", **given
):
    """TreeEnsembleClassifier: the best class and the scores."""
    _, labels = only(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    forest, nodes, targets, weights = once(_linked, "class", given)
    scores, has = _scores(batch(X), once, len(labels), "SUM", forest, nodes, targets, weights)
    base = _reals("base_values", given)
    if len(labels) == 2 and len(set(targets)) == 1:
        index, scores = _binary(scores, base, targets[0], post_transform, mixed=bool((weights < 0).any()))
    else:
        scores, has = _based(scores, has, base)
        index, scores = argmax(xp.where(has, scores, -np.inf), 1), transform(scores, post_transform)
    return labels_of(labels, index), scores.astype(np.float32)


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


@op("TreeEnsemble", domain=DOMAIN, since=5, heavy=True)
def tree_ensemble(
    X, *, aggregate_function: Literal[0, 1, 2, 3] = 1, leaf_targetids, leaf_weights, membership_values=None, n_targets,
    nodes_falseleafs, nodes_falsenodeids, nodes_featureids, nodes_missing_value_tracks_true=None, nodes_modes,
    nodes_hitrates=None,  # noqa: ARG001 - only helps to lay out memory
    nodes_splits, nodes_trueleafs, nodes_truenodeids, once, post_transform: Literal[0, 1, 2, 3, 4] = 0, tree_roots,
):  # fmt: skip
    """TreeEnsemble: branches and leaves in separate arrays; here the leaves follow the branches."""
    inner, n_leaves = len(nodes_splits), len(leaf_weights)
    leaves = np.arange(inner, inner + n_leaves)

    def extended(values, leaf=0):
        return np.pad(values, (0, n_leaves), constant_values=leaf)

    def children(ids, leafs):
        return np.append(np.array(ids) + inner * np.array(leafs), leaves)

    modes, missing = extended(nodes_modes, LEAF), extended(nodes_missing_value_tracks_true or np.zeros(inner))
    true, false = children(nodes_truenodeids, nodes_trueleafs), children(nodes_falsenodeids, nodes_falseleafs)
    members = _member_sets(np.zeros(0) if membership_values is None else membership_values, modes)
    features, splits, roots = extended(nodes_featureids), extended(nodes_splits), np.array(tree_roots)
    forest = Forest(modes, features, splits, true, false, missing, roots, members)
    votes, aggregate = (leaves, np.array(leaf_targetids), leaf_weights), get_args(Aggregate)[aggregate_function]
    scores, _ = _scores(batch(X), once, n_targets, aggregate, forest, *votes)
    return transform(scores, get_args(Transform)[post_transform]).astype(X.dtype)
