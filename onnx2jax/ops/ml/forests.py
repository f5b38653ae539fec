"""Forests of decision trees: all rows descend all trees one level at a time, one gather per level.

Small trees are not descended: each false condition excludes the leaves of its true branch, and the first leaf that
remains is reached (QuickScorer, Lucchese et al. 2015). Traced programs have no loop and one kernel then.

Ensembles that read the same rows, such as the trees of an isolation forest, descend as one forest.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import compat
from ...limits import FOREST_CONDITIONS, FOREST_COPIES, FOREST_LEAVES
from ..arrays import is_known, repeat, xp

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARE = operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne
NEQ, MEMBER, LEAF = (MODES.index(m) for m in ("BRANCH_NEQ", "BRANCH_MEMBER", "LEAF"))


class Forest(NamedTuple):
    """Parallel arrays, one entry per node; the children of a leaf are the leaf itself. And the votes of leaves."""

    modes: Any
    features: Any
    splits: Any
    true: Any
    false: Any
    missing: Any
    """Whether NaN takes the true branch."""
    roots: Any
    """The root node of each tree."""
    voters: Any = ()
    """The leaf of each vote."""
    targets: Any = ()
    weights: Any = ()
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
        if end > FOREST_COPIES * len(forest.modes):
            raise ValueError(f"the nodes do not form trees: {len(forest.modes)} nodes have more than {end} branches")
    at = np.concatenate(levels).astype(np.int64)
    modes, features, missing = forest.modes[at], forest.features[at], forest.missing[at].astype(bool)
    if (least := features.min(initial=0)) < 0:
        raise ValueError(f"the trees use feature {least}, which is negative")
    members = forest.members[at] if MEMBER in modes else None
    roots = np.arange(len(forest.roots), dtype=np.uint32)
    fields = np.concatenate(firsts), features, modes, missing, modes != LEAF, forest.splits[at]
    return _packed(fields, members, roots, depth), at, np.concatenate(trees)


def _packed(fields, members, roots, depth):
    """The Layout whose words consist of the fields: children, features, modes, missing, whether inner, and splits."""
    *fields, splits = fields
    modes, inner = fields[2], fields[4]
    used = np.unique(modes[inner != 0]).tolist()
    fields[2] = modes if len(used) > 1 else 0 * modes
    most = int(fields[1].max(initial=0))
    widths = (len(modes).bit_length(), most.bit_length(), 3 if len(used) > 1 else 0, 1)
    shifts = tuple(np.cumsum(widths).tolist())
    words = np.zeros(len(modes), np.uint64)
    for field, shift in zip(fields, (0, *shifts), strict=True):
        words |= field.astype(np.uint64) << np.uint64(shift)
    fields = *(f.astype(t) for f, t in zip(fields, "iibbb", strict=True)), splits
    splits_in_words = shifts[-1] < 32 and splits.dtype == np.float32
    if splits_in_words:
        words |= splits.view(np.uint32).astype(np.uint64) << np.uint64(32)
    elif shifts[-1] < 32:
        words = words.astype(np.uint32)
    missing = bool(fields[3].any())
    return Layout(words, splits_in_words, members, used, shifts, missing, roots, depth, most + 1, fields)


def _side_by_side(layouts):
    """One Layout of several; the positions and the roots of each follow those of the one before."""
    sizes = [len(layout.words) for layout in layouts]
    starts = np.cumsum([0, *sizes[:-1]])
    fields = [[*layout.fields] for layout in layouts]
    for arrays, layout, start in zip(fields, layouts, starts, strict=True):
        arrays[0] = arrays[0] + start
        arrays[2] = arrays[2] if len(layout.modes) > 1 else np.full(len(arrays[2]), (*layout.modes, LEAF)[0])
    members, most = None, max((v.members.shape[1] for v in layouts if v.members is not None), default=0)
    if any(layout.members is not None for layout in layouts):
        members = np.full((sum(sizes), most), np.nan, fields[0][-1].dtype)
        for layout, start, size in zip(layouts, starts, sizes, strict=True):
            if layout.members is not None:
                members[start : start + size, : layout.members.shape[1]] = layout.members
    roots = np.concatenate([layout.roots + start for layout, start in zip(layouts, starts, strict=True)])
    depth = max(layout.depth for layout in layouts)
    return _packed([*map(np.concatenate, zip(*fields, strict=True))], members, roots.astype(np.uint32), depth)


def _get(table, at):
    """Entries of a table at indices that are known to be in bounds."""
    return table[at] if is_known((table, at)) else jnp.asarray(table).at[at].get(mode="promise_in_bounds")


def _leaves(X, layout):
    """The position of the leaf that each row reaches in each tree: [N, trees]."""
    if layout.n_features > X.shape[1]:
        raise ValueError(f"the trees use feature {layout.n_features - 1}, but the input has {X.shape[1]} features")
    alike = len(layout.modes) == 1 and layout.modes[0] not in (NEQ, MEMBER)
    if is_known(X):
        return _leaves_of_one_mode(X, layout) if alike else _descended(X, layout, repeat)
    default = partial(_descended, layout=layout, repeat=repeat)
    cpu = partial(_descended, layout=layout, repeat=_unrolled) if compat.has_serial_loops() else default
    if alike and (masks := _masks(layout)) is not None:
        by_masks, rows = partial(_leaves_by_masks, layout=layout, masks=masks), X.shape[0]
        cpu = by_masks if masks.leaves.shape[1] <= FOREST_LEAVES * layout.depth else cpu
        default = default if isinstance(rows, int) and rows * masks.conditions.size > FOREST_CONDITIONS else by_masks
    return default(X) if cpu is default else compat.platform_dependent(X, cpu=cpu, default=default)


def _unrolled(n, step, state):
    """``repeat`` for up to 64 steps without a loop, each step a kernel of its own."""
    if n > 64:
        return repeat(n, step, state)
    for k in range(n):
        state = lax.optimization_barrier(step(k, state))
    return state


def _descended(X, layout, repeat):
    """``_leaves``, level by level."""
    known = is_known(X)
    rows = xp(X).arange(X.shape[0], dtype=np.uint32)[:, None]  # unsigned, so that JAX does not test for negatives

    def field(words, k):
        if known:
            return layout.fields[k].take(words)
        first, last = (0, *layout.shifts)[k], (*layout.shifts, layout.shifts[-1] + 1)[k]
        return (words >> words.dtype.type(first) & words.dtype.type(2 ** (last - first) - 1)).astype(np.uint32)

    def descend(_, at):
        words = at if known else _get(layout.words, at)
        if layout.splits_in_words and not known:
            splits, words = (words >> np.uint64(32)).astype(np.uint32).view(np.float32), words.astype(np.uint32)
        else:
            splits = _get(layout.fields[-1], at)
        x, is_true = _get(X, (rows, field(words, 1))), False
        for mode in layout.modes:
            passed = (x[..., None] == _get(layout.members, at)).any(-1) if mode == MEMBER else _COMPARE[mode](x, splits)
            is_true = passed if len(layout.modes) == 1 else xp.where(field(words, 2) == mode, passed, is_true)
        if layout.missing or NEQ in layout.modes:  # all other modes are false for NaN
            is_true = xp.where(x != x, field(words, 3) == 1, is_true)
        right = ~is_true & (field(words, 4) == 1)
        return (field(words, 0) + right.astype(np.uint32)).astype(np.uint32)

    return repeat(layout.depth, descend, xp(X).zeros(rows.shape, np.uint32) + layout.roots)


class Masks(NamedTuple):
    """The conditions of each tree, and what a false one excludes; the leaves of a tree are numbered from true to false.

    Shorter trees are padded with conditions that exclude nothing.
    """

    conditions: Any
    """Their positions in the layout [trees, conditions]."""
    remaining: Any
    """The leaves that remain if the condition is false, the first as the highest bit."""
    leaves: Any
    """The positions of the leaves [trees, leaves]."""


def _masks(layout):
    """The Masks of a forest whose conditions are alike; None where a tree has more than 64 leaves."""
    children, inner = layout.fields[0], layout.fields[4] != 0
    count, first, tree = np.ones(len(inner), int), np.zeros(len(inner), int), np.zeros(len(inner), int)
    at, true, false = np.flatnonzero(inner), children[inner], children[inner] + 1
    tree[layout.roots] = np.arange(len(layout.roots))
    for _ in range(layout.depth):  # one level more is right after each
        count[at] = count[true] + count[false]
    for _ in range(layout.depth):
        first[true], first[false] = first[at], first[at] + count[true]
        tree[true] = tree[false] = tree[at]
    n_leaves = int(count[layout.roots].max(initial=0))
    if not 1 < n_leaves <= 64:
        return None
    dtype, bits = (np.uint32, 32) if n_leaves <= 32 else (np.uint64, 64)
    every = np.iinfo(dtype).max
    # Python's integers, since NumPy's shift by 64 bits is undefined.
    starts, counts = first[true].tolist(), count[true].tolist()
    excluded = [((1 << n) - 1) << (bits - k - n) for k, n in zip(starts, counts, strict=True)]
    order = np.argsort(tree[at], kind="stable")
    at, owner = at[order], tree[at][order]
    column = np.arange(len(at)) - np.searchsorted(owner, owner)
    conditions = np.zeros((len(layout.roots), n_leaves - 1), int)
    remaining = np.full(conditions.shape, every, dtype)
    conditions[owner, column] = at
    remaining[owner, column] = every ^ np.array(excluded, dtype)[order]
    leaves = np.zeros((len(layout.roots), n_leaves), np.uint32)
    leaves[tree[~inner], first[~inner]] = np.flatnonzero(~inner)
    return Masks(conditions, remaining, leaves)


def _leaves_by_masks(X, layout, masks):
    """``_leaves`` of traced rows, from all conditions at once."""
    _, features, _, missing, _, splits = layout.fields
    (count, width), every = masks.leaves.shape, np.iinfo(masks.remaining.dtype).max
    x = jnp.take(X, features[masks.conditions], axis=1, mode="clip")
    is_true = _COMPARE[layout.modes[0]](x, splits[masks.conditions])
    if layout.missing:
        is_true |= (x != x) & (missing[masks.conditions] == 1)
    left = lax.reduce_and(jnp.where(is_true, masks.remaining.dtype.type(every), masks.remaining), (2,))
    numbers = lax.clz(left).astype(np.int32) + np.arange(0, count * width, width, dtype=np.int32)
    return _get(masks.leaves.reshape(-1), numbers)


def _leaves_of_one_mode(X, layout):
    """``_leaves`` of NumPy's rows where all nodes compare alike, in a third of its calls of NumPy."""
    children, features, _, missing, inner, splits = layout.fields
    compare, numbers = _COMPARE[layout.modes[0]], X.reshape(-1)
    first = np.arange(0, X.size, max(X.shape[1], 1), np.intp)[: X.shape[0], None]
    at = np.broadcast_to(layout.roots, (X.shape[0], len(layout.roots)))
    for _ in range(layout.depth):
        x = numbers.take(first + features.take(at))
        is_true = compare(x, splits.take(at))
        if layout.missing:
            is_true |= (x != x) & (missing.take(at) == 1)
        at = children.take(at) + (inner.take(at) > is_true)
    return at


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


def _tables(forest, n_targets, aggregate, dtype):
    """The Tables of a forest, its splits and weights in ``dtype``."""
    nodes, targets, weights = forest.voters, forest.targets, forest.weights
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
        target = any_leaf.argmax(1)
        layout = layout._replace(roots=layout.roots[np.argsort(target, kind="stable")])
        table, voted = (np.take_along_axis(v, target[trees][:, None], 1)[:, 0] for v in (table, voted))
    return Tables(layout, used, table, None if all_leaves.any(0).all() else voted)


class Ensemble(NamedTuple):
    """The rows and the forest of a node, and how the votes of its leaves become scores."""

    X: Any
    forest: Forest
    n_targets: int
    aggregate: str
    once: Any

    def tables(self):
        """Its Tables, computed in float64 if the input, the splits or the weights are float64."""
        wide = np.float64 in (self.X.dtype, self.forest.splits.dtype, self.forest.weights.dtype)
        return self.once(_tables, self.forest, self.n_targets, self.aggregate, dtype=np.dtype("f8" if wide else "f4"))


def scores_of(ensembles):
    """(aggregated weights [N, targets], whether any leaf voted [N or 1, targets]) of ensembles with the same rows.

    Those whose weights have the same type and width descend as one forest.
    """
    alike, results = {}, [None] * len(ensembles)
    for i, ensemble in enumerate(ensembles):
        tables = ensemble.tables()
        alike.setdefault((tables.weights.dtype, tables.weights.shape[1:]), []).append((i, ensemble, tables))
    for (dtype, _), group in alike.items():
        several = [tables for *_, tables in group]
        layout = several[0].layout if len(several) == 1 else _side_by_side([tables.layout for tables in several])
        leaves, start = _leaves(ensembles[0].X.astype(dtype), layout), 0
        weights = _get(_stacked([tables.weights for tables in several]), leaves)
        voted = None
        if any(tables.voted is not None for tables in several):
            known = [np.ones_like(t.weights, bool) if t.voted is None else t.voted for t in several]
            voted = _get(_stacked(known), leaves)
        for i, ensemble, tables in group:
            trees = slice(start, start := start + len(tables.layout.roots))
            votes = None if tables.voted is None else voted[:, trees]
            results[i] = _aggregated(ensemble, tables, weights[:, trees], votes)
    return results


def _stacked(arrays):
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _aggregated(ensemble, tables, weights, voted):
    """The scores and votes of an ensemble from the entries of its tables at the leaves [N, trees]."""
    used, trees, n_targets = tables.targets, len(tables.layout.roots), ensemble.n_targets

    def over_trees(reduce, values):
        if values.ndim == 3:
            return values[:, 0] if trees == 1 else reduce(values, axis=1)
        if trees == len(used):
            return values
        return reduce(values.reshape(-1, len(used), trees // len(used)), axis=2)

    scores = over_trees(_AGGREGATE.get(ensemble.aggregate, _SUM)[2], weights)
    scores = scores / weights.dtype.type(trees) if ensemble.aggregate == "AVERAGE" else scores
    any_vote = np.ones((1, len(used)), bool) if voted is None else over_trees(xp.any, voted)
    if voted is not None:
        scores = xp.where(any_vote, scores, scores.dtype.type(0))
    if len(used) == n_targets:
        return scores, any_vote
    if len(used) and used[-1] - used[0] + 1 == len(used):
        widths = (0, 0), (int(used[0]), n_targets - 1 - int(used[-1]))
        return xp.pad(scores, widths), xp.pad(any_vote, widths)
    columns = np.full(n_targets, len(used))
    columns[used] = np.arange(len(used))
    return tuple(xp.pad(v, ((0, 0), (0, 1)))[:, columns] for v in (scores, any_vote))
