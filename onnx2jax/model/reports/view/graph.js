// The graph of a page: which values are drawn and read; blocks, opened or closed, with their sizes and places.

const data = JSON.parse(document.getElementById('data').textContent)
const {nodes, graphs, operators} = data
const $ = id => document.getElementById(id)
const sheet = $('sheet'), view = $('view'), panel = $('panel'), map = $('map')
const ROW = 26, HEAD = 30, PAD = 18, SPACE = 44, PILL = 24, SHEETS = 8, FIRST = 28
const escaped = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`)
const kindOf = i => operators[nodes[i].type].kind
const opOf = i => operators[nodes[i].type].name
const f = n => Math.round(n * 10) / 10
/** An element as text. Attributes are escaped, and left out where undefined; what is inside is not escaped. */
const tag = (name, attributes, ...inside) => {
  const given = Object.entries(attributes).filter(([, value]) => value !== undefined && value !== null)
  const text = given.map(([key, value]) => ` ${key}="${typeof value === 'number' ? +value.toFixed(2) : escaped(value)}"`)
  return `<${name}${text.join('')}>${inside.join('')}</${name}>`
}
const dot = kind => `<i class="dot" style="background:var(--${kind})"></i>`

// ---------------------------------------------------------------- values

/** Names that are drawn in each graph, their readers and the names of outputs. */
const facts = graphs.map(graph => {
  Object.setPrototypeOf(graph.values, null)  // a value may be called constructor
  const drawn = new Set, readers = new Map, producers = new Map, outputs = new Set
  for (const item of graph.items) {
    if (item.kind === 'input') item.values.forEach(n => drawn.add(n))
    if (item.kind === 'output') item.values.forEach(n => outputs.add(n))
  }
  return {drawn, readers, producers, outputs}
})
const reads = i => [...nodes[i].inputs, ...(nodes[i].captures ?? [])].filter(Boolean)
nodes.forEach((node, i) => {
  const {drawn, readers, producers} = facts[node.graph]
  for (const n of node.outputs) if (n) { producers.set(n, i); if (!node.folded) drawn.add(n) }
  for (const n of new Set(reads(i))) readers.get(n)?.push(i) ?? readers.set(n, [i])
})
const owners = new Map  // graph -> the first node that holds it
nodes.forEach((node, i) => node.graphs?.forEach(([, g]) => owners.has(g) || owners.set(g, i)))

const leaves = item => typeof item === 'number' ? [item] : (item.items ?? []).flatMap(leaves)
const shown = item => leaves(item).filter(i => !nodes[i].folded)
const cache = new Map

/** Names that an item reads from outside, and those of its own that are read outside. */
function io(item, g) {
  if (item.kind === 'input') return {reads: [], writes: item.values}
  if (item.kind === 'output') return {reads: item.values, writes: []}
  const key = item.kind === 'graph' ? graphs[item.graph] : item
  if (cache.has(key)) return cache.get(key)
  const own = shown(item.kind === 'graph' ? graphs[item.graph] : item), inside = new Set(own)
  const made = new Set(own.flatMap(i => nodes[i].outputs))
  const {readers, outputs, drawn} = facts[item.kind === 'graph' ? item.graph : g]
  const outer = new Set(own.flatMap(reads).filter(n => !made.has(n) && !(item.kind === 'graph' && drawn.has(n))))
  const leaving = [...made].filter(n => n && (outputs.has(n) || readers.get(n)?.some(r => !inside.has(r) && !nodes[r].folded)))
  const found = {reads: [...outer], writes: item.kind === 'graph' ? [] : leaving}
  cache.set(key, found)
  return found
}

/** For each name that a layer of a repeat reads or computes, the names at its place in all layers. */
function aliases(item, k) {
  const layers = item.items.map(shown), found = new Map
  const join = pick => layers[k].forEach((node, p) => pick(node).forEach((name, slot) => {
    const names = found.get(name) ?? found.set(name, new Set([name])).get(name)
    for (const layer of layers) if (layer[p] !== undefined) names.add(pick(layer[p])[slot])
  }))
  join(i => nodes[i].inputs), join(i => nodes[i].outputs)
  return found
}

// ---------------------------------------------------------------- blocks

const opened = new Set, layerOf = new Map
const measure = document.createElement('canvas').getContext('2d'), widths = new Map
function textWidth(text, font = '12.5px system-ui, sans-serif') {
  const key = font + text
  if (!widths.has(key)) { measure.font = font; widths.set(key, measure.measureText(text).width) }
  return widths.get(key)
}
const cut = (text, most) => text.length > most ? `…${text.slice(1 - most)}` : text
const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text
const shape = type => {
  const found = /^(\w+)\[(.*)\]$/.exec(type ?? '')
  if (!found) return type ?? ''
  const dims = found[2] ? found[2].replaceAll(', ', '×') : 'scalar'
  return found[1] === 'float32' ? dims : `${found[1]} ${dims}`
}
const typeOf = (name, g) => {
  for (let at = g; at !== undefined; at = owners.has(at) ? nodes[owners.get(at)].graph : undefined)
    if (graphs[at].values[name]) return graphs[at].values[name]
  return {}
}
/** Three significant digits with the first unit that is not too large. */
const scaled = (n, units) => {
  const [size, unit] = units.find(([size]) => n >= 0.9995 * size) ?? units.at(-1)
  return `${+(n / size).toPrecision(3)}${unit}`
}
const number = n => scaled(n, [[1e12, ' T'], [1e9, ' G'], [1e6, ' M'], [1e3, ' k'], [1, '']])
const seconds = n => scaled(n, [[1, ' s'], [1e-3, ' ms'], [1e-6, ' µs']])

/** A few words beside an operator: the shape of its weights, or an attribute. */
function detail(i) {
  const node = nodes[i], {values} = graphs[node.graph], attributes = node.attributes ?? {}
  const weight = node.inputs.map(n => values[n]).find(v => v?.parameter && v.type.includes(','))
  if (weight) return shape(weight.type)
  if (opOf(i) === 'Cast') return /^\w+/.exec(values[node.outputs[0]]?.type ?? '')?.[0] ?? ''
  const name = ['kernel_shape', 'perm', 'axis', 'axes', 'equation', 'mode'].find(n => n in attributes)
  return name ? cut(`${name === 'kernel_shape' ? '' : name + ' '}${attributes[name]}`, 24) : ''
}

const isPort = b => b.kind === 'input' || b.kind === 'output'
const boldWidth = text => textWidth(text, '600 12.5px system-ui, sans-serif') * 1.04
const smallWidth = text => textWidth(text, '11px system-ui, sans-serif')

class Block {
  constructor(item, parent, id, g, env) {
    Object.assign(this, {item, parent, id, g, env, x: 0, y: 0})
    this.node = typeof item === 'number' ? item : null
    this.kind = this.node !== null ? 'node' : item.kind
    this.inner = this.node !== null ? nodes[item].graphs ?? [] : []
    this.opens = this.inner.length > 0 || ['scope', 'repeat', 'part', 'graph', 'layer'].includes(this.kind)
    this.open = this.kind === 'root' || (this.opens && opened.has(id))
    this.rows = this.kind === 'stack' ? item.items : this.node !== null ? [item] : []
    this.children = this.open ? this.inside() : []
    const holder = this.kind === 'graph' ? graphs[item.graph] : item
    this.leaves = isPort(this) ? [] : shown(holder)
    this.all = this.rows.length || isPort(this) ? this.leaves : leaves(holder)  // folded ones, too
    if (!this.open) this.measured()
  }
  get title() { return this.node !== null ? opOf(this.item) : this.item.title }
  get layer() { return layerOf.get(this.id) ?? 0 }
  inside() {
    const {item, id} = this
    const made = (items, prefix, g, env) => items.map((one, k) => [one, k])
      .filter(([one]) => one.kind === 'input' || one.kind === 'output' || shown(one).length)
      .map(([one, k]) => new Block(one, this, `${prefix}/${k}`, g, env))
    const within = (g, isolated) => new Set([...(isolated ? [] : this.env), ...facts[g].drawn])
    if (this.kind === 'repeat') return made(item.items[this.layer].items, `${id}:${this.layer}`, this.g, this.env)
    if (this.kind === 'graph') return made(graphs[item.graph].items, id, item.graph, within(item.graph))
    if (this.inner.length === 1) {
      const [[name, g]] = this.inner
      return made(graphs[g].items, id, g, within(g, !name))
    }
    if (this.inner.length)
      return this.inner.map(([title, graph], k) => new Block({kind: 'graph', title, graph}, this, `${id}/${k}`, this.g, this.env))
    return made(item.items, id, this.g, this.env)
  }
  measured() {
    if (isPort(this)) {
      const times = this.item.values.length > 1 ? ` × ${this.item.values.length}` : ''
      this.text = cut(this.title, 34) + times
      this.w = textWidth(this.text) + 30, this.h = PILL
    } else if (this.rows.length) {
      this.details = this.rows.map(detail)
      const wide = this.rows.map((i, k) => boldWidth(opOf(i)) + (this.details[k] ? 18 + smallWidth(this.details[k]) : 0))
      this.w = Math.max(92, Math.max(...wide) + 32 + (this.opens ? 18 : 0)), this.h = ROW * this.rows.length
    } else {
      this.text = cut(this.title, 40), this.sub = this.about()
      const badge = this.kind === 'repeat' ? 56 : 0
      this.w = Math.max(132, boldWidth(this.text) + 46 + badge, smallWidth(this.sub) + 46)
      this.h = 54 + (badge && SHEETS)
    }
  }
  about() {
    const sum = total(this.all, 'parameters'), count = this.leaves.length
    return `${count} node${count === 1 ? '' : 's'}${sum ? ` · ${number(sum)} parameters` : ''}`
  }
  get absolute() {
    let {x, y} = this
    for (let b = this.parent; b; b = b.parent) { x += b.x; y += b.y }
    return {x, y, w: this.w, h: this.h}
  }
  each(visit) { visit(this); this.children.forEach(c => c.each(visit)) }
}
const total = (list, field) => list.reduce((sum, i) => sum + (nodes[i][field] ?? 0), 0)

/** Lays out an open block from inside out; sets its size, its children's places, its edges, and where values enter and leave. */
function layout(block) {
  const {children, item, g, env} = block
  children.forEach(c => c.open && layout(c))
  const rim = block.kind !== 'root', writer = new Map, ports = new Map, found = new Map
  const ends = children.map(c => io(c.item, c.g))
  ends.forEach(({writes}, c) => writes.forEach(n => writer.set(n, c)))
  const repeat = block.kind === 'repeat' ? aliases(item, block.layer) : null
  const every = name => repeat?.get(name) ?? [name]
  const vertices = children.map(c => ({w: Math.max(c.w, textWidth(labelOf(c), '10.5px system-ui, sans-serif') + 8), h: c.h}))
  const beside = c => children[c] ? (vertices[c].w - children[c].w) / 2 : 0
  const port = (name, rank) => {
    const key = rank + name
    if (!ports.has(key)) { ports.set(key, {name, rank, at: vertices.length}); vertices.push({w: 8, h: 0, rank}) }
    return ports.get(key).at
  }
  const join = (from, to, name) => {
    const out = children[from]?.bottom?.get(name), into = children[to]?.top?.get(name)
    const key = `${from}|${to}|${out}|${into}`
    if (found.has(key)) found.get(key).names.push(name)
    else {
      const ends = {out: out && out + beside(from), in: into && into + beside(to)}
      found.set(key, {from, to, key: `${from}|${out ?? ''}`, ...ends, names: [name]})
    }
  }
  ends.forEach(({reads}, c) => {
    for (const name of reads) {
      const from = writer.get(name)
      if (from !== undefined) { if (from !== c) join(from, c, name) }
      else if (rim && env.has(name)) join(port(name, 'first'), c, name)
    }
  })
  if (rim && block.kind !== 'graph' && !block.inner.length) {
    const leaving = new Set(io(item, g).writes)
    for (const [name, c] of writer) if ([...every(name)].some(n => leaving.has(n))) join(c, port(name, 'last'), name)
  }
  const edges = [...found.values()], done = layered(vertices, edges, SPACE)
  const has = rank => [...ports.values()].some(p => p.rank === rank), side = rim ? PAD : 0
  const top = rim ? HEAD + 14 - (has('first') ? SPACE : 0) : 0
  children.forEach((c, i) => { c.x = done.at[i].x + side + beside(i), c.y = done.at[i].y + top })
  block.w = Math.max(done.w + 2 * side, rim ? boldWidth(block.title) + (repeat ? 220 : 80) : 0)
  const shift = (block.w - 2 * side - done.w) / 2
  children.forEach(c => { c.x += shift })
  block.h = done.h + top + (rim ? 28 - (has('last') ? SPACE : 0) : 0)
  block.top = new Map, block.bottom = new Map
  for (const {name, rank, at} of ports.values())
    for (const n of every(name)) block[rank === 'first' ? 'top' : 'bottom'].set(n, done.at[at].x + side + shift + 4)
  const into = new Map
  block.edges = edges.map((edge, e) => {
    const {back, points} = done.paths[e]
    const isY = k => back ? k === 1 || k === 4 : k % 2
    const moved = points.map((v, k) => v + (isY(k) ? top : side + shift))
    if (edge.from >= children.length) moved[1] = 0
    if (edge.to >= children.length) moved[moved.length - 1] = block.h
    else if (!back && edge.in === undefined) into.get(edge.to)?.push(moved) ?? into.set(edge.to, [moved])
    return {...edge, back, points: moved}
  })
  for (const [c, list] of into) {  // spread over the top of their block
    list.sort((a, b) => a.at(-4) - b.at(-4))
    const step = Math.min(16, (children[c].w - 30) / list.length)
    list.forEach((points, k) => { points[points.length - 2] += (k - (list.length - 1) / 2) * step })
  }
}

function curve({back, points}) {
  if (back) {
    const [x, y, side, u, v] = points, middle = (y + v) / 2
    return `M${f(x)} ${f(y)}C${f(x)} ${f(y + 36)} ${f(side)} ${f(y + 36)} ${f(side)} ${f(middle)}`
      + `C${f(side)} ${f(v - 36)} ${f(u)} ${f(v - 36)} ${f(u)} ${f(v)}`
  }
  let path = `M${f(points[0])} ${f(points[1])}`
  for (let k = 2; k < points.length; k += 2) {
    const [x, y, u, v] = points.slice(k - 2, k + 2), middle = (y + v) / 2
    path += Math.abs(x - u) < 0.5 ? `L${f(u)} ${f(v)}` : `C${f(x)} ${f(middle)} ${f(u)} ${f(middle)} ${f(u)} ${f(v)}`
  }
  return path
}
