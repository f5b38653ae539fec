"""ai.onnx.ml tree ensembles, as forests."""

from __future__ import annotations

import functools
from inspect import Parameter
from typing import Any, Literal, get_args

import numpy as np

from ..arrays import argmax, xp
from ..registry import deprecated, op, taking
from .forests import LEAF, MEMBER, MODES, Ensemble, Forest, scores_of
from .scores import DOMAIN, LABELS, Transform, batch, class_labels, labels_of, result_dtype, transform, two_scores

Aggregate = Literal["AVERAGE", "SUM", "MIN", "MAX"]


def _of_ensembles(body):
    """An operator from a generator, which yields its Ensemble, receives the scores, and yields the operator's result.

    Its attribute ``for_siblings`` evaluates several nodes on the same rows (see Operator.for_siblings).
    """

    def for_siblings(X, nodes):
        calls = [body(X, **attributes) for attributes in nodes]
        scores = scores_of([next(call) for call in calls])
        return [call.send(result) for call, result in zip(calls, scores, strict=True)]

    @functools.wraps(body)
    def alone(X, **attributes):
        return for_siblings(X, [attributes])[0]

    alone.for_siblings = for_siblings
    return alone


# ------------------------------------------------------------------------ TreeEnsemble{Regressor,Classifier}

_TRAITS: Any = {"heavy": True, "wide": True, "exact": ("X",)}
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


def _forest_by_id(prefix, attributes):
    """The Forest of versions 1 to 4, whose nodes are identified by tree id and node id; hit rates are ignored."""
    splits = _floats("nodes_values", attributes)
    missing = attributes["nodes_missing_value_tracks_true"] or (0,) * len(splits)
    false, features, modes, nodes, trees, true = (attributes[f"nodes_{k}"] for k in _NODES)
    if unknown := set(modes) - {*MODES} | {MODES[MEMBER]}.intersection(modes):
        raise ValueError(f"nodes_modes {sorted(unknown)} must be among {MODES} (BRANCH_MEMBER in TreeEnsemble only)")
    if len({len(v) for v in (trees, nodes, true, false, modes, missing, features, splits)}) != 1:
        raise ValueError("the attributes nodes_* must all have the same length")
    trees, nodes, true, false = (np.array(v, np.int64) for v in (trees, nodes, true, false))
    known_trees, known_nodes = np.unique(trees), np.unique(nodes)

    def key(trees, ids):
        return np.searchsorted(known_trees, trees) * len(known_nodes) + np.searchsorted(known_nodes, ids)

    keys = key(trees, nodes)
    order = np.argsort(keys, kind="stable")

    def find(of, ids):
        at = order[np.searchsorted(keys, key(of, ids), sorter=order).clip(max=len(order) - 1)]
        if (wrong := (trees[at] != of) | (nodes[at] != ids)).any():
            raise ValueError(f"no node has tree id {of[wrong][0]} and node id {ids[wrong][0]}")
        return at

    modes, index = np.array([MODES.index(m) for m in modes]), np.arange(len(nodes))
    inner = modes != LEAF
    true, false = (np.where(inner, find(trees, np.where(inner, ids, nodes)), index) for ids in (true, false))
    roots = np.setdiff1d(index, np.concatenate([true[inner], false[inner]]))
    if len(roots) != len(np.unique(trees)):
        raise ValueError(f"{len(np.unique(trees))} trees have {len(roots)} roots")
    voters, ids, targets = (np.array(attributes[f"{prefix}_{k}"], np.int64) for k in ("treeids", "nodeids", "ids"))
    votes = find(voters, ids), targets, _floats(f"{prefix}_weights", attributes)
    return Forest(modes, np.where(inner, features, 0), splits, true, false, np.array(missing, bool), roots, *votes)


def _add_base(scores, any_vote, base):
    """(scores plus base values, whether any leaf or base value contributes)."""
    if len(base) not in (0, scores.shape[1]):
        raise ValueError(f"base_values must have 0 or {scores.shape[1]} entries, one per score (it has {len(base)})")
    return (scores + base.astype(scores.dtype), True) if len(base) else (scores, any_vote)


@op("TreeEnsembleRegressor", domain=DOMAIN, **_TRAITS)
@_of_ensembles
@taking(**_schema("target"))
def tree_ensemble_regressor(
    X, *, aggregate_function: Aggregate = "SUM", n_targets, once, post_transform: Transform = "NONE", double=False,
    **attributes,
):  # fmt: skip
    """TreeEnsembleRegressor: aggregated leaf weights plus base values [N, targets]."""
    forest = once(_forest_by_id, "target", attributes)
    scores, any_vote = yield Ensemble(batch(X), forest, n_targets, aggregate_function, once)
    scores, _ = _add_base(scores, any_vote, once(_floats, "base_values", attributes))
    yield transform(scores, post_transform).astype(result_dtype(double))


_BASES = f"{LABELS}; one score per row with several base_values is unsupported"


@op("TreeEnsembleClassifier", domain=DOMAIN, labels="classlabels_int64s", limits=_BASES, **_TRAITS)
@_of_ensembles
@taking(**_schema("class"))
def tree_ensemble_classifier(
    X, *, classlabels_int64s=None, classlabels_strings=None, once, post_transform: Transform = "NONE", double=False,
    **attributes,
):  # fmt: skip
    """TreeEnsembleClassifier: (best class, scores)."""
    labels = once(class_labels, {"classlabels_int64s": classlabels_int64s, "classlabels_strings": classlabels_strings})
    forest = once(_forest_by_id, "class", attributes)
    scores, any_vote = yield Ensemble(batch(X), forest, len(labels), "SUM", once)
    base = once(_floats, "base_values", attributes)
    voted, margin = once(_single_class, forest)
    if len(labels) == 2 and voted is not None:
        index, scores = _binary(scores, base, voted, post_transform, margin=margin)
    else:
        scores, any_vote = _add_base(scores, any_vote, base)
        index, scores = argmax(xp.where(any_vote, scores, -np.inf), 1), transform(scores, post_transform)
    yield labels_of(labels, index), scores.astype(result_dtype(double))


def _single_class(forest):
    """(the only class that any leaf votes for, or None; whether any weight is negative)."""
    return forest.targets[0] if len(set(forest.targets)) == 1 else None, bool((forest.weights < 0).any())


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


def _forest_by_index(attributes):
    """The Forest of version 5, which stores branches and leaves separately; the leaves are appended to the branches."""
    splits, weights, modes = attributes["nodes_splits"], attributes["leaf_weights"], attributes["nodes_modes"]
    inner, n_leaves = len(splits), len(weights)
    leaves = np.arange(inner, inner + n_leaves)
    of_nodes = [k for k in _REQUIRED if k.startswith("nodes_")]
    for k, count in {**dict.fromkeys(of_nodes, inner), "leaf_targetids": n_leaves}.items():
        if len(attributes[k]) != count:
            raise ValueError(f"{k} must have {count} entries (it has {len(attributes[k])})")

    def extended(values, leaf=0):
        return np.pad(values, (0, n_leaves), constant_values=leaf)

    def children(side):
        ids, leafs = (np.array(attributes[f"nodes_{side}{k}"], np.int64) for k in ("nodeids", "leafs"))
        if not np.isin(leafs, (0, 1)).all():
            raise ValueError(f"nodes_{side}leafs {sorted({*leafs.tolist()})} must be 0 or 1")
        if (wrong := (ids < 0) | (ids >= np.where(leafs, n_leaves, inner))).any():
            raise ValueError(f"nodes_{side}nodeids has {ids[wrong][0]}, of {inner} nodes and {n_leaves} leaves")
        return np.append(ids + inner * leafs, leaves)

    if len(modes) and modes.max() > MEMBER:
        raise ValueError(
            f"nodes_modes has {modes.max()}; the modes are 0 to {MEMBER}, {', '.join(MODES[: MEMBER + 1])}"
        )
    missing = extended(attributes["nodes_missing_value_tracks_true"] or np.zeros(inner))
    modes, values = extended(modes, LEAF), attributes["membership_values"]
    members = _member_sets(np.zeros(0) if values is None else values, modes)
    features, roots = extended(attributes["nodes_featureids"]), np.array(attributes["tree_roots"])
    if not len(roots) or roots.min() < 0 or roots.max() >= inner:
        raise ValueError(f"tree_roots {roots.tolist()} must be among the {inner} nodes")
    branches, votes = (children("true"), children("false")), (leaves, np.array(attributes["leaf_targetids"]), weights)
    return Forest(modes, features, extended(splits), *branches, missing, roots, *votes, members)


_REQUIRED = (
    "leaf_targetids", "leaf_weights", "nodes_falseleafs", "nodes_falsenodeids", "nodes_featureids", "nodes_modes",
    "nodes_splits", "nodes_trueleafs", "nodes_truenodeids", "tree_roots",
)  # fmt: skip
# Hit rates are hints for memory layout, and are ignored.
_OPTIONAL = ("membership_values", "nodes_hitrates", "nodes_missing_value_tracks_true")


@op("TreeEnsemble", domain=DOMAIN, since=5, **_TRAITS)
@_of_ensembles
@taking(**dict.fromkeys(_REQUIRED, Parameter.empty), **dict.fromkeys(_OPTIONAL))
def tree_ensemble(
    X, *, aggregate_function: Literal[0, 1, 2, 3] = 1, n_targets, once, post_transform: Literal[0, 1, 2, 3, 4] = 0,
    **attributes,
):  # fmt: skip
    """TreeEnsemble: aggregated leaf weights of trees whose nodes may test set membership."""
    aggregate = get_args(Aggregate)[aggregate_function]
    scores, _ = yield Ensemble(batch(X), once(_forest_by_index, attributes), n_targets, aggregate, once)
    yield transform(scores, get_args(Transform)[post_transform]).astype(X.dtype)
