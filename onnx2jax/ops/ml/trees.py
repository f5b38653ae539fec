"""ai.onnx.ml tree ensembles: all trees of all rows go down one level at a time, by gathers over arrays of nodes."""

from __future__ import annotations

import operator
from inspect import Parameter
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from ..arrays import argmax, is_known, xp
from ..registry import op, taking, withdrawn
from .scores import DOMAIN, Transform, batch, labels_of, only, repeat, transform, two_scores

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


def _leaves(forest, X):
    """The node where each row ends in each tree: [N, trees]."""
    np_ = xp(X)
    if int(forest.features.max(initial=0)) >= X.shape[1]:
        raise ValueError(f"the trees ask for feature {forest.features.max()}, the input has {X.shape[1]}")
    # One gather for all that is integer, since each costs alike.
    links = np.stack([forest.features, forest.true, forest.false, forest.missing, forest.modes], -1).astype(np.int32)
    used = [m for m in np.unique(forest.modes).tolist() if m != LEAF]
    rows = np_.arange(X.shape[0])[:, None]

    def test(mode, x, at):
        if mode == MEMBER:
            return (x[..., None] == _get(forest.members, at)).any(-1)
        return _COMPARE[mode](x, _get(forest.splits, at))

    def down(_, at):
        feature, true, false, missing, modes = np_.moveaxis(_get(links, at), -1, 0)
        x = _get(X, (rows, feature))
        go = np_.zeros(at.shape, bool)
        for mode in used:
            go = test(mode, x, at) if len(used) == 1 else np_.where(modes == mode, test(mode, x, at), go)
        return np_.where(np_.where(x != x, missing == 1, go), true, false)

    roots = np_.asarray(forest.roots, np.int32)
    return repeat(_depth(forest), down, np_.broadcast_to(roots, (X.shape[0], len(roots))))


def _scores(X, forest, votes, n_targets, aggregate):
    """The aggregated weights [N, targets], and where any leaf had something to say.

    The votes are arrays: the node, the target and the weight of each. All is compared and summed in doubles where the
    input, the splits or the weights are doubles.
    """
    nodes, targets, weights = votes
    if len(targets) and not 0 <= targets.min() <= targets.max() < n_targets:
        raise ValueError(f"the target ids {sorted(set(targets.tolist()))} leave the {n_targets} targets or classes")
    width = np.float64 if np.float64 in (X.dtype, forest.splits.dtype, weights.dtype) else np.float32
    merge, neutral = {"MIN": (np.minimum, np.inf), "MAX": (np.maximum, -np.inf)}.get(aggregate, (np.add, 0))
    table = np.full((len(forest.modes), n_targets), neutral, width)
    merge.at(table, (nodes, targets), weights.astype(width))
    voted = np.zeros(table.shape, bool)
    voted[nodes, targets] = True
    splits, members = forest.splits.astype(width), forest.members.astype(width)
    leaves = _leaves(forest._replace(splits=splits, members=members), X.astype(width))
    scores, has = _get(table, leaves), _get(voted, leaves).any(1)
    scores = scores.min(1) if aggregate == "MIN" else scores.max(1) if aggregate == "MAX" else scores.sum(1)
    scores = scores / len(forest.roots) if aggregate == "AVERAGE" else scores
    return xp(X).where(has, scores, width(0)), has


# ------------------------------------------------------------------------ TreeEnsemble{Regressor,Classifier}


def _pick(name, tensor, floats):
    """An attribute that may come as a tensor of doubles instead."""
    if tensor is not None and floats:
        raise ValueError(f"{name} and {name}_as_tensor must not both be given")
    return np.array(floats or (), np.float32) if tensor is None else tensor.reshape(-1)


_REQUIRED = ("falsenodeids", "featureids", "modes", "nodeids", "treeids", "truenodeids")
_OPTIONAL = ("hitrates", "hitrates_as_tensor", "missing_value_tracks_true", "values", "values_as_tensor")
NODES = {f"nodes_{k}": Parameter.empty for k in _REQUIRED} | {f"nodes_{k}": None for k in _OPTIONAL}


def _linked(votes, given):
    """The forest, and its votes, of versions 1 to 4, whose nodes are named by a tree id and a node id."""
    _pick("nodes_hitrates", given["nodes_hitrates_as_tensor"], given["nodes_hitrates"])  # only help to lay out memory
    splits = _pick("nodes_values", given["nodes_values_as_tensor"], given["nodes_values"])
    missing = given["nodes_missing_value_tracks_true"] or (0,) * len(splits)
    false, features, modes, nodes, trees, true = (given[f"nodes_{k}"] for k in _REQUIRED)
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
    voters, ids, targets = (np.array(v, np.int64) for v in votes[:3])
    return forest, (find(voters, ids), targets, votes[3])


@op("TreeEnsembleRegressor", domain=DOMAIN, heavy=True)
@taking(**NODES)
def tree_ensemble_regressor(
    X, *, aggregate_function: Aggregate = "SUM", base_values=None, base_values_as_tensor=None, n_targets,
    post_transform: Transform = "NONE", target_ids, target_nodeids, target_treeids, target_weights=None,
    target_weights_as_tensor=None, **nodes,
):  # fmt: skip
    """TreeEnsembleRegressor: the aggregated leaves, plus the base values."""
    X, base = batch(X), _pick("base_values", base_values_as_tensor, base_values)
    if len(base) not in (0, n_targets):
        raise ValueError(f"base_values must be none or one for each of {n_targets} targets (got {len(base)})")
    weights = _pick("target_weights", target_weights_as_tensor, target_weights)
    forest, votes = _linked((target_treeids, target_nodeids, target_ids, weights), nodes)
    scores, _ = _scores(X, forest, votes, n_targets, aggregate_function)
    scores = scores + base.astype(scores.dtype) if len(base) else scores
    return transform(scores, post_transform).astype(np.float32)


@op("TreeEnsembleClassifier", domain=DOMAIN, heavy=True)
@taking(**NODES)
def tree_ensemble_classifier(
    X, *, base_values=None, base_values_as_tensor=None, class_ids, class_nodeids, class_treeids, class_weights=None,
    class_weights_as_tensor=None, classlabels_int64s=None, classlabels_strings=None,
    post_transform: Transform = "NONE", **nodes,
):  # fmt: skip
    """TreeEnsembleClassifier: the best class and the scores."""
    X, base = batch(X), _pick("base_values", base_values_as_tensor, base_values)
    _, labels = only(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    weights = _pick("class_weights", class_weights_as_tensor, class_weights)
    forest, votes = _linked((class_treeids, class_nodeids, class_ids, weights), nodes)
    scores, has = _scores(X, forest, votes, len(labels), "SUM")
    base = base.astype(scores.dtype)
    if len(labels) == 2 and len(set(class_ids)) == 1:
        index, scores = _binary(scores, base, class_ids[0], post_transform, mixed=bool((weights < 0).any()))
    elif len(base) in (0, len(labels)):
        scores, has = (scores + base, True) if len(base) else (scores, has)
        index, scores = argmax(xp(X).where(has, scores, -np.inf), 1), transform(scores, post_transform)
    else:
        raise ValueError(f"base_values must be none or one for each of {len(labels)} classes (got {len(base)})")
    return labels_of(labels, index), scores.astype(np.float32)


def _binary(scores, base, voted, post_transform, *, mixed):
    """Two classes, and votes for only one of them: a probability, or a margin when votes of both signs are `mixed`.

    By convention of the converters votes for class 0 mean class 1, unlike votes for class 1.
    """
    if len(base) > 1 - voted:
        raise ValueError(f"{len(base)} base_values are ambiguous when all votes are for class {voted} of two")
    score = scores[:, voted : voted + 1] + (base if len(base) else 0)
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
    nodes_falseleafs, nodes_falsenodeids, nodes_featureids, nodes_hitrates=None, nodes_missing_value_tracks_true=None,
    nodes_modes, nodes_splits, nodes_trueleafs, nodes_truenodeids, post_transform: Literal[0, 1, 2, 3, 4] = 0,
    tree_roots,
):  # fmt: skip
    """TreeEnsemble: branches and leaves in separate arrays; here the leaves follow the branches."""
    if nodes_hitrates is not None and len(nodes_hitrates) != len(nodes_splits):
        raise ValueError("nodes_hitrates must have one entry for each node")
    X, inner, n_leaves = batch(X), len(nodes_splits), len(leaf_weights)
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
    votes = leaves, np.array(leaf_targetids), leaf_weights
    scores, _ = _scores(X, forest, votes, n_targets, get_args(Aggregate)[aggregate_function])
    return transform(scores, get_args(Transform)[post_transform]).astype(X.dtype)
