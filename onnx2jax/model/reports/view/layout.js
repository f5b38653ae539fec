'use strict'
// Layered layout: layers by longest path, orders by barycentres, places by least squares.
// Long edges pass through bends, one in each layer between their ends; edges of one value share them.

const SWEEPS = 10, BEND = 10, GAP = 26

/**
 * Places blocks in layers.
 * @param blocks  [{w, h, rank: 'first' | 'last' | undefined}]
 * @param edges   [{from, to, key, out, in}]: indices of blocks; edges of one key share bends;
 *                offsets of the ends from the left of their block, its middle when left out
 * @param space   between layers
 * @returns {w, h, at: [{x, y}], paths: [[x, y, ...] for each edge]}
 */
function layered(blocks, edges, space) {
  const n = blocks.length
  if (!n) return {w: 0, h: 0, at: [], paths: []}
  const ranks = ranked(blocks, edges)
  const rows = Array.from({length: Math.max(...ranks) + 1}, () => [])
  const wide = blocks.map(b => b.w), rank = [...ranks], up = [], down = []
  for (let i = 0; i < n; i++) { rows[ranks[i]].push(i); up.push([]); down.push([]) }
  const chains = new Map(), links = []
  const link = (a, b, out, into, weight) => {
    const one = {a, b, out, into, weight}
    down[a].push(one), up[b].push(one)
  }
  for (const edge of edges) {  // bends: of an edge against the order, none
    let {from, to} = edge
    const reversed = ranks[from] >= ranks[to]
    if (reversed) { links.push(null); continue }
    const key = edge.key ?? from
    const chain = chains.get(key) ?? chains.set(key, []).get(key)
    const out = edge.out ?? blocks[from].w / 2, into = edge.in ?? blocks[to].w / 2
    let before = from
    for (let r = ranks[from] + 1; r < ranks[to]; r++) {
      const k = r - ranks[from] - 1
      if (chain[k] === undefined) {
        const bend = wide.length
        chain[k] = bend, wide.push(BEND), rank.push(r), up.push([]), down.push([]), rows[r].push(bend)
        link(before, bend, before === from ? out : BEND / 2, BEND / 2, k ? 40 : 6)
      }
      before = chain[k]
    }
    link(before, to, before === from ? out : BEND / 2, into, before === from ? 1 : 4)
    links.push({bends: chain.slice(0, ranks[to] - ranks[from] - 1), out, into})
  }
  ordered(rows, up, down, wide)
  const x = placed(rows, up, down, wide)
  const least = Math.min(...x)
  for (let i = 0; i < x.length; i++) x[i] -= least
  const tops = [], highs = rows.map(row => Math.max(0, ...row.map(i => i < n ? blocks[i].h : 0)))
  let y = 0
  rows.forEach((row, r) => { tops.push(y); y += highs[r] + space })
  const h = y - space
  const w = Math.max(...x.map((left, i) => left + wide[i]))
  const at = blocks.map((b, i) => ({x: x[i], y: tops[ranks[i]] + (ranks[i] ? 0 : highs[0] - b.h)}))
  return {w, h, at, paths: edges.map((edge, e) => routed(edge, links[e]))}

  function routed({from, to, out, in: into}, found) {
    const a = at[from], b = at[to]
    if (!found) {  // against the order: around the right side, up
      const side = Math.max(a.x + blocks[from].w, b.x + blocks[to].w) + GAP / 2, middle = i => blocks[i].w / 2
      return {back: true, points: [a.x + (out ?? middle(from)), a.y + blocks[from].h, side, b.x + (into ?? middle(to)), b.y]}
    }
    const points = [a.x + found.out, a.y + blocks[from].h]
    found.bends.forEach((bend, k) => {
      const r = ranks[from] + 1 + k
      points.push(x[bend] + BEND / 2, tops[r], x[bend] + BEND / 2, tops[r] + highs[r])
    })
    points.push(b.x + found.into, b.y)
    return {back: false, points}
  }
}

/** The layer of each block: below all blocks that it reads, except in cycles; sources are near their readers. */
function ranked(blocks, edges) {
  const n = blocks.length, after = Array.from({length: n}, () => []), missing = new Array(n).fill(0)
  for (const {from, to} of edges) if (from !== to) { after[from].push(to); missing[to]++ }
  const entered = blocks.some(b => b.rank === 'first')  // then no other block is in the first layer
  const rank = blocks.map(b => entered && b.rank !== 'first' ? 1 : 0), done = new Array(n).fill(false), sources = missing.map(k => !k)
  const ready = []
  for (let i = 0; i < n; i++) if (!missing[i]) ready.push(i)
  let first = 0
  for (let count = 0; count < n; count++) {
    let block = ready.shift()
    if (block === undefined) {  // a cycle: its first block
      while (done[first]) first++
      block = first
    }
    done[block] = true
    for (const other of after[block]) {
      if (done[other]) continue
      rank[other] = Math.max(rank[other], rank[block] + 1)
      if (!--missing[other]) ready.push(other)
    }
  }
  for (let i = 0; i < n; i++) {
    const below = after[i].map(j => rank[j]).filter(r => r > 0)
    if (sources[i] && blocks[i].rank !== 'first' && below.length) rank[i] = Math.min(...below) - 1
  }
  const last = Math.max(0, ...rank.filter((_, i) => blocks[i].rank !== 'last')) + 1
  blocks.forEach((b, i) => { if (b.rank === 'last') rank[i] = last })
  return rank
}

/** Sorts each row by the mean position of the neighbours above, then below, and keeps the order with fewest crossings. */
function ordered(rows, up, down, wide) {
  const place = new Array(wide.length).fill(0)
  const put = row => {
    let left = -row.reduce((sum, i) => sum + wide[i] + GAP, 0) / 2
    for (const i of row) { place[i] = left + wide[i] / 2; left += wide[i] + GAP }
  }
  rows.forEach(put)
  let best = crossings(rows, down, wide), kept = rows.map(row => [...row])
  for (let sweep = 0; sweep < SWEEPS && best; sweep++) {
    const near = sweep % 2 ? down : up, end = sweep % 2 ? 'b' : 'a'
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      const mean = new Map(row.map(i => [i, near[i].length
        ? near[i].reduce((sum, l) => sum + place[l[end]] - wide[l[end]] / 2 + (end === 'a' ? l.out : l.into), 0) / near[i].length
        : place[i]]))
      row.sort((i, j) => mean.get(i) - mean.get(j))
      put(row)
    }
    const found = crossings(rows, down, wide)
    if (found < best) { best = found; kept = rows.map(row => [...row]) }
  }
  kept.forEach((row, r) => rows[r].splice(0, row.length, ...row))
}

function crossings(rows, down) {
  let total = 0
  for (let r = 0; r + 1 < rows.length; r++) {
    const position = new Map(rows[r + 1].map((i, k) => [i, k])), size = rows[r + 1].length
    const tree = new Array(size + 1).fill(0)
    let seen = 0
    for (const i of rows[r]) {
      const ends = down[i].map(l => position.get(l.b)).sort((a, b) => a - b)
      for (const end of ends) {
        let before = 0
        for (let k = end + 1; k; k -= k & -k) before += tree[k]
        total += seen - before
      }
      for (const end of ends) { for (let k = end + 1; k <= size; k += k & -k) tree[k]++; seen++ }
    }
  }
  return total
}

/** Left ends of blocks and bends: as near as possible to their neighbours, in order and without overlap. */
function placed(rows, up, down, wide) {
  const x = new Array(wide.length).fill(0)
  for (const row of rows) {
    let left = -row.reduce((sum, i) => sum + wide[i] + GAP, 0) / 2
    for (const i of row) { x[i] = left; left += wide[i] + GAP }
  }
  for (let sweep = 0; sweep < 24; sweep++) {
    const both = sweep > 17
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      const want = [], weight = []
      for (const i of row) {
        let sum = 0, total = 0
        if (both || !(sweep % 2)) for (const l of up[i]) { sum += l.weight * (x[l.a] + l.out - l.into); total += l.weight }
        if (both || sweep % 2) for (const l of down[i]) { sum += l.weight * (x[l.b] + l.into - l.out); total += l.weight }
        want.push(total ? sum / total : x[i]), weight.push(total || 0.05)
      }
      settle(row, want, weight, x, wide)
    }
  }
  return x
}

/** The positions of a row that are nearest to the wanted ones, by least squares, in order and without overlap. */
function settle(row, want, weight, x, wide) {
  const pools = [], offsets = []
  let offset = 0
  row.forEach((i, k) => {
    if (k) offset += wide[row[k - 1]] + (wide[row[k - 1]] === BEND && wide[i] === BEND ? BEND : GAP)
    offsets.push(offset)
    let pool = {sum: (want[k] - offset) * weight[k], weight: weight[k], count: 1}
    while (pools.length && pools.at(-1).sum / pools.at(-1).weight > pool.sum / pool.weight) {
      const before = pools.pop()
      pool = {sum: before.sum + pool.sum, weight: before.weight + pool.weight, count: before.count + pool.count}
    }
    pools.push(pool)
  })
  let k = 0
  for (const pool of pools) for (let j = 0; j < pool.count; j++, k++) x[row[k]] = pool.sum / pool.weight + offsets[k]
}
