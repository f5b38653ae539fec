"""ai.onnx.ml tree ensembles: all trees of all rows go down one level at a time, by gathers over arrays of nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import argmax, xp
from .registry import op, withdrawn
from .scores import DOMAIN, TRANSFORMS, batch, labels_of, one_of, only, transform, two_scores

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
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
    members: Any
    """For each node the set a BRANCH_MEMBER node tests, filled up with NaN; None where no node does."""
    roots: Any
    leaf: Any
    """For each node its row in the two tables below."""
    weights: Any
    """[leaves, targets]; where a leaf says nothing of a target, the neutral element of the aggregate."""
    has: Any
    """[leaves, targets]: whether the leaf says anything of the target."""


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
    return table[at] if isinstance(at, np.ndarray) else jnp.asarray(table).at[at].get(mode="promise_in_bounds")


def _leaves(forest, X):
    """The leaf that each row reaches in each tree: [N, trees], as rows of the leaf tables."""
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
        split = _get(forest.splits, at)
        return (x <= split, x < split, x >= split, x > split, x == split, x != split)[mode]

    def down(_, at):
        feature, true, false, missing, modes = np_.moveaxis(_get(links, at), -1, 0)
        x = X[rows, feature] if np_ is np else X.at[rows, feature].get(mode="promise_in_bounds")
        go = np_.zeros(at.shape, bool)
        for mode in used:
            go = test(mode, x, at) if len(used) == 1 else np_.where(modes == mode, test(mode, x, at), go)
        return np_.where(np_.where(x != x, missing == 1, go), true, false)

    at = np_.broadcast_to(np_.asarray(forest.roots), (X.shape[0], len(forest.roots)))
    if np_ is np:
        for k in range(_depth(forest)):
            at = down(k, at)
    else:
        at = lax.fori_loop(0, _depth(forest), down, at)
    return _get(forest.leaf, at)


def _scores(forest, X, aggregate):
    """The aggregated weights [N, targets], and where any leaf had something to say."""
    np_, leaves = xp(X), _leaves(forest, X)
    weights, has = _get(forest.weights, leaves), _get(forest.has, leaves).any(1)
    if aggregate in ("SUM", "AVERAGE"):
        total = weights.sum(1)
        return total / len(forest.roots) if aggregate == "AVERAGE" else total, has
    return np_.where(has, weights.min(1) if aggregate == "MIN" else weights.max(1), 0).astype(weights.dtype), has


def _tables(rows, targets, weights, n_rows, n_targets, aggregate):
    """The weights of leaves as a dense table; several weights of one leaf and target are aggregated."""
    if len(targets) and not 0 <= targets.min() <= targets.max() < n_targets:
        raise ValueError(f"the target ids {sorted(set(targets.tolist()))} leave the {n_targets} targets or classes")
    merge, neutral = {"MIN": (np.minimum, np.inf), "MAX": (np.maximum, -np.inf)}.get(aggregate, (np.add, 0))
    table = np.full((n_rows, n_targets), neutral, weights.dtype)
    merge.at(table, (rows, targets), weights)
    has = np.zeros(table.shape, bool)
    has[rows, targets] = True
    return table, has


def _width(X, *arrays):
    """The type to compare and to sum in: doubles where the input or an attribute has them."""
    return np.result_type(np.float32, *(v.dtype for v in (X, *arrays) if v is not None and v.dtype == np.float64))


def _pick(name, tensor, floats):
    """An attribute that may come as a tensor of doubles instead."""
    if tensor is not None and floats:
        raise ValueError(f"{name} and {name}_as_tensor must not both be given")
    return np.array(floats or (), np.float32) if tensor is None else tensor.reshape(-1)


# ------------------------------------------------------------------------ TreeEnsemble{Regressor,Classifier}


def _forest(X, n_targets, aggregate, votes, weights, nodes, splits):
    """The forest of versions 1 to 4, whose nodes are named by a tree id and a node id."""
    names = ("treeids", "nodeids", "truenodeids", "falsenodeids")
    tree, node, true, false = (np.array(nodes[k], np.int64) for k in names)
    modes = np.array([MODES.index(one_of(m, MODES, "nodes_modes")) for m in nodes["modes"]], np.int8)
    missing = np.array(nodes["missing_value_tracks_true"] or np.zeros(len(node)), bool)
    features = np.array(nodes["featureids"], np.int32)
    if len({len(v) for v in (tree, node, true, false, modes, missing, features, splits)}) != 1:
        raise ValueError("the attributes nodes_* must all have the same length")
    if MEMBER in modes:
        raise ValueError("BRANCH_MEMBER needs TreeEnsemble of ai.onnx.ml 5")
    span = max(int(v.max(initial=0)) for v in (node, true, false)) + 1
    keys = tree * span + node
    order = np.argsort(keys, kind="stable")

    def find(trees, ids):
        wanted = trees * span + ids
        at = order[np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)]
        if not (keys[at] == wanted).all():
            k = int(np.argmax(keys[at] != wanted))
            raise ValueError(f"no node has the tree id {trees[k]} and the node id {ids[k]}")
        return at

    inner, here = modes != LEAF, np.arange(len(node))

    def children(ids):
        return np.where(inner, find(tree, np.where(inner, ids, node)), here).astype(np.int32)

    on_true, on_false = children(true), children(false)
    roots = np.setdiff1d(here, np.concatenate([on_true[inner], on_false[inner]])).astype(np.int32)
    if len(roots) != len(np.unique(tree)):
        raise ValueError(f"{len(np.unique(tree))} trees have {len(roots)} roots")
    voters = find(np.array(votes[0], np.int64), np.array(votes[1], np.int64))
    leaves, rows = np.unique(voters, return_inverse=True)
    width = _width(X, splits, weights)
    # The last row of the tables is for nodes without a vote.
    leaf = np.full(len(node), len(leaves), np.int32)
    leaf[leaves] = np.arange(len(leaves))
    targets = np.array(votes[2], np.int64)
    tables = _tables(rows, targets, weights.astype(width), len(leaves) + 1, n_targets, aggregate)
    features = np.where(inner, features, 0)
    splits = splits.astype(width)
    return Forest(modes, features, splits, on_true, on_false, missing, None, roots, leaf, *tables), width


def _nodes(**nodes):
    """The attributes nodes_*, with the hit rates (which only help to lay out memory) left aside."""
    missing = [k for k, v in nodes.items() if v is None and k not in ("missing_value_tracks_true", "hitrates")]
    if missing:
        raise ValueError(f"the trees lack the attributes {', '.join('nodes_' + k for k in missing)}")
    return nodes


@op("TreeEnsembleRegressor", domain=DOMAIN, heavy=True)
def tree_ensemble_regressor(
    X,
    *,
    aggregate_function="SUM",
    base_values=None,
    base_values_as_tensor=None,
    n_targets=None,
    nodes_falsenodeids=None,
    nodes_featureids=None,
    nodes_hitrates=None,
    nodes_hitrates_as_tensor=None,
    nodes_missing_value_tracks_true=None,
    nodes_modes=None,
    nodes_nodeids=None,
    nodes_treeids=None,
    nodes_truenodeids=None,
    nodes_values=None,
    nodes_values_as_tensor=None,
    post_transform="NONE",
    target_ids=None,
    target_nodeids=None,
    target_treeids=None,
    target_weights=None,
    target_weights_as_tensor=None,
):
    """TreeEnsembleRegressor: the aggregated leaves, plus the base values."""
    X = batch(X)
    _pick("nodes_hitrates", nodes_hitrates_as_tensor, nodes_hitrates)  # only help to lay out memory
    nodes = _nodes(
        falsenodeids=nodes_falsenodeids,
        featureids=nodes_featureids,
        missing_value_tracks_true=nodes_missing_value_tracks_true,
        modes=nodes_modes,
        nodeids=nodes_nodeids,
        treeids=nodes_treeids,
        truenodeids=nodes_truenodeids,
    )
    one_of(aggregate_function, AGGREGATES, "aggregate_function")
    base = _pick("base_values", base_values_as_tensor, base_values)
    if n_targets is None or len(base) not in (0, n_targets):
        raise ValueError(f"n_targets ({n_targets}) must be given, and base_values be none or as many (got {len(base)})")
    votes = target_treeids, target_nodeids, target_ids
    weights = _pick("target_weights", target_weights_as_tensor, target_weights)
    splits = _pick("nodes_values", nodes_values_as_tensor, nodes_values)
    forest, width = _forest(X, n_targets, aggregate_function, votes, weights, nodes, splits)
    scores, _ = _scores(forest, X.astype(width), aggregate_function)
    scores = scores + base.astype(width) if len(base) else scores
    return transform(scores, post_transform).astype(np.float32)


@op("TreeEnsembleClassifier", domain=DOMAIN, heavy=True)
def tree_ensemble_classifier(
    X,
    *,
    base_values=None,
    base_values_as_tensor=None,
    class_ids=None,
    class_nodeids=None,
    class_treeids=None,
    class_weights=None,
    class_weights_as_tensor=None,
    classlabels_int64s=None,
    classlabels_strings=None,
    nodes_falsenodeids=None,
    nodes_featureids=None,
    nodes_hitrates=None,
    nodes_hitrates_as_tensor=None,
    nodes_missing_value_tracks_true=None,
    nodes_modes=None,
    nodes_nodeids=None,
    nodes_treeids=None,
    nodes_truenodeids=None,
    nodes_values=None,
    nodes_values_as_tensor=None,
    post_transform="NONE",
):
    """TreeEnsembleClassifier: the best class and the scores."""
    X = batch(X)
    _, labels = only(classlabels_int64s=classlabels_int64s, classlabels_strings=classlabels_strings)
    _pick("nodes_hitrates", nodes_hitrates_as_tensor, nodes_hitrates)
    nodes = _nodes(
        falsenodeids=nodes_falsenodeids,
        featureids=nodes_featureids,
        missing_value_tracks_true=nodes_missing_value_tracks_true,
        modes=nodes_modes,
        nodeids=nodes_nodeids,
        treeids=nodes_treeids,
        truenodeids=nodes_truenodeids,
    )
    votes = class_treeids, class_nodeids, class_ids
    weights = _pick("class_weights", class_weights_as_tensor, class_weights)
    splits = _pick("nodes_values", nodes_values_as_tensor, nodes_values)
    forest, width = _forest(X, len(labels), "SUM", votes, weights, nodes, splits)
    base = _pick("base_values", base_values_as_tensor, base_values).astype(width)
    scores, has = _scores(forest, X.astype(width), "SUM")
    if len(labels) == 2 and len(set(class_ids)) == 1:
        index, scores = _binary(scores, base, class_ids[0], post_transform, mixed=bool((weights < 0).any()))
    elif len(base) in (0, len(labels)):
        scores, has = (scores + base, xp(X).ones(has.shape, bool)) if len(base) else (scores, has)
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


def _enumerated(value, names, what):
    if not 0 <= value < len(names):
        raise ValueError(f"{what} must lie in [0, {len(names) - 1}] (got {value})")
    return names[value]


def _member_sets(values, modes, n_nodes):
    """The sets of the BRANCH_MEMBER nodes, one row for each node, filled up with NaN."""
    where = np.flatnonzero(modes == MEMBER)
    if not len(where):
        return None
    if values is None:
        raise ValueError("BRANCH_MEMBER nodes need the attribute 'membership_values'")
    sets = [s[~np.isnan(s)] for s in np.split(values, np.flatnonzero(np.isnan(values)))]
    if len(values) and np.isnan(values[-1]):
        sets.pop()
    if len(sets) != len(where):
        raise ValueError(f"membership_values holds {len(sets)} sets for {len(where)} BRANCH_MEMBER nodes")
    rows = np.full((n_nodes, max(1, *map(len, sets))), np.nan, values.dtype)
    for node, members in zip(where, sets, strict=True):
        rows[node, : len(members)] = members
    return rows


@op("TreeEnsemble", domain=DOMAIN, since=5, heavy=True)
def tree_ensemble(
    X,
    *,
    aggregate_function=1,
    leaf_targetids,
    leaf_weights,
    membership_values=None,
    n_targets=None,
    nodes_falseleafs,
    nodes_falsenodeids,
    nodes_featureids,
    nodes_hitrates=None,
    nodes_missing_value_tracks_true=None,
    nodes_modes,
    nodes_splits,
    nodes_trueleafs,
    nodes_truenodeids,
    post_transform=0,
    tree_roots,
):
    """TreeEnsemble: branches and leaves in separate arrays; here the leaves follow the branches."""
    if n_targets is None:
        raise ValueError("TreeEnsemble needs the attribute 'n_targets'")
    if nodes_hitrates is not None and len(nodes_hitrates) != len(nodes_splits):
        raise ValueError("nodes_hitrates must have one entry for each node")
    aggregate = _enumerated(aggregate_function, AGGREGATES, "aggregate_function")
    inner, n_leaves = len(nodes_splits), len(leaf_weights)
    leaves = np.arange(inner, inner + n_leaves)

    def children(ids, leafs):
        ids = np.array(ids) + np.where(np.array(leafs, bool), inner, 0)
        return np.concatenate([ids, leaves]).astype(np.int32)

    def extended(values, filler, dtype):
        return np.concatenate([np.array(values, dtype), np.full(n_leaves, filler, dtype)])

    X = batch(X)
    width = _width(X)
    modes = extended(nodes_modes, LEAF, np.int8)
    members = None if membership_values is None else membership_values.astype(width)
    leaf = np.concatenate([np.zeros(inner, np.int32), np.arange(n_leaves, dtype=np.int32)])
    targets = np.array(leaf_targetids, np.int64)
    tables = _tables(np.arange(n_leaves), targets, leaf_weights.astype(width), n_leaves, n_targets, aggregate)
    forest = Forest(
        modes,
        extended(nodes_featureids, 0, np.int32),
        extended(nodes_splits, 0, width),
        children(nodes_truenodeids, nodes_trueleafs),
        children(nodes_falsenodeids, nodes_falseleafs),
        extended(nodes_missing_value_tracks_true or np.zeros(inner), False, bool),
        _member_sets(members, modes, len(modes)),
        np.array(tree_roots, np.int32),
        leaf,
        *tables,
    )
    scores, _ = _scores(forest, X.astype(width), aggregate)
    return transform(scores, _enumerated(post_transform, TRANSFORMS, "post_transform")).astype(X.dtype)
