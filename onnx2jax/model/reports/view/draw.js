// Draws the blocks: colours, SVG, the view that moves and zooms, and its map.

// ---------------------------------------------------------------- colours

const MODES = {
  operator: {name: 'operators', has: () => true},
  seconds: {name: 'time', has: () => data.time, of: list => total(list, 'seconds'), text: seconds},
  flops: {name: 'FLOPs', has: () => data.flops, of: list => total(list, 'flops'), text: number},
  bytes: {name: 'bytes', has: () => data.flops !== undefined, of: list => total(list, 'bytes'), text: number},
  parameters: {name: 'parameters', has: () => data.flops && data.parameters, of: list => total(list, 'parameters'), text: number},
  sharding: {name: 'shardings', has: () => data.mesh},
}
const HUES = ['product', 'arithmetic', 'norm', 'activation', 'pool', 'quant', 'control', 'port']
const shardingOf = i => {
  const specs = nodes[i].inputs.map(n => graphs[nodes[i].graph].values[n]?.sharding).filter(Boolean)
  return specs.find(s => !s.endsWith('replicated')) ?? specs[0]
}
const shardings = data.mesh ? [...new Set(nodes.map((_, i) => shardingOf(i)).filter(s => s && s !== 'replicated'))].sort() : []
let mode = data.mesh ? 'sharding' : data.time ? 'seconds' : 'operator', hottest = 1

/** The fill of a card for some nodes, and the text of its value. */
function tint(list) {
  const {of, text} = MODES[mode]
  if (mode === 'sharding') {
    const specs = new Set(list.map(shardingOf).filter(s => s && s !== 'replicated'))
    const hue = specs.size === 1 ? HUES[shardings.indexOf([...specs][0]) % HUES.length] : specs.size ? 'soft' : null
    return {fill: hue && `color-mix(in srgb, var(--${hue}) 38%, var(--card))`}
  }
  if (!of) return {}
  const value = of(list)
  const heat = value && `color-mix(in srgb, var(--hot) ${f(72 * Math.sqrt(value / hottest))}%, var(--card))`
  return {fill: heat || null, text: value ? text(value) : ''}
}
const troubles = list => list.some(i => nodes[i].differs || nodes[i].findings?.some(x => x.severity === 'error')) ? 'bad'
  : list.some(i => nodes[i].findings || nodes[i].outputs.some(n => graphs[nodes[i].graph].values[n]?.figures?.nan)) ? 'warn' : ''

// ---------------------------------------------------------------- drawing

let root, blocks = new Map, chosen = null
function build() {
  root = new Block({kind: 'root', title: data.title, items: graphs[0].items}, null, '', 0, facts[0].drawn)
  layout(root)
  blocks = new Map
  root.each(b => blocks.set(b.id, b))
}
function draw() {
  const {of} = MODES[mode]
  hottest = of ? Math.max(1e-12, ...nodes.map((_, i) => nodes[i].folded ? 0 : of([i]))) : 1
  view.innerHTML = drawnInside(root)
  legend()
  mark()
}
const elementOf = id => id === '' ? view : view.querySelector(`[data-id="${CSS.escape(id)}"]`)
const text = (x, y, words, kind) => tag('text', {x, y, class: kind}, escaped(words))
const box = (attributes, kind = 'card') => tag('rect', {class: kind, ...attributes})
const drawnInside = block => [
  ...block.edges.map(edge => tag('path', {class: edge.back ? 'edge back' : 'edge', d: curve(edge)})),
  ...block.children.map(drawn),
  ...block.children.map(b => labelOf(b) && text(b.x + b.w / 2, b.y + b.h + 15, labelOf(b), 'label')),
].join('')

/** The types of what a block computes, in a few words. */
function labelOf(b) {
  if (b.kind === 'output') return ''
  const types = [...new Set(io(b.item, b.g).writes.map(n => shape(typeOf(n, b.g).type)).filter(Boolean))]
  return types.length ? short(types[0], 30) + (types.length > 1 ? ` +${types.length - 1}` : '') : ''
}
function chevron(x, y, open) {
  const d = open ? `M${f(x - 4)} ${y - 2}l4 4l4 -4` : `M${f(x - 2)} ${y - 4}l4 4l-4 4`
  return tag('path', {class: 'chevron', d})
}

function drawn(b) {
  const attributes = {'data-id': b.id, transform: `translate(${f(b.x)},${f(b.y)})`}, {w, h} = b
  const trouble = troubles(b.leaves)
  const spot = trouble ? tag('circle', {class: 'mark', cx: w - 2, cy: 2, r: 5, fill: `var(--${trouble})`}) : ''
  if (isPort(b)) return tag('g', {class: 'block port', ...attributes}, box({width: w, height: h, rx: 12}), text(15, 16.5, b.text))
  if (b.open) {
    const parts = [chevron(16, 16, true), text(30, 20, cut(b.title, 60), 'name'), b.kind === 'repeat' ? stepper(b) : '']
    return tag('g', {class: 'block group', ...attributes}, box({width: w, height: h, rx: 12}), drawnInside(b), ...parts)
  }
  return tag('g', {class: 'block', ...attributes}, b.rows.length ? rowsOf(b) : closedGroup(b), spot)
}
function rowsOf(b) {
  const {w, h} = b
  const rows = b.rows.map((i, k) => {
    const {fill, text: value} = tint([i]), y = k * ROW, aside = value || b.details[k]
    const hit = {x: 0.7, y: y + 0.7, width: w - 1.4, height: ROW - 1.4, rx: b.rows.length > 1 ? 6 : 8}
    return tag('g', {class: 'row', 'data-node': i, style: `--kind:var(--${kindOf(i)})`},
      box({...hit, style: fill && `fill:${fill}`}, 'hit'), box({x: 8, y: y + 7, width: 4, height: ROW - 14, rx: 2}, 'stripe'),
      text(20, y + 17.5, opOf(i), 'name'), aside ? text(w - (b.opens ? 26 : 11), y + 17, aside, value ? 'end' : 'soft end') : '',
      k ? tag('path', {class: 'rule', d: `M8 ${y}H${f(w - 8)}`}) : '')
  })
  return box({width: w, height: h, rx: 8}) + rows.join('') + (b.opens ? chevron(w - 14, ROW / 2, false) : '')
}
function closedGroup(b) {
  const {w} = b, repeat = b.kind === 'repeat', h = b.h - (repeat ? SHEETS : 0), {fill, text: value} = tint(b.all)
  const sheets = repeat ? [SHEETS, SHEETS / 2].map(d => box({x: d, y: d, width: w, height: h, rx: 9}, 'sheet')) : []
  return sheets.join('') + box({width: w, height: h, rx: 9, style: fill && `fill:${fill}`}) + chevron(16, 18, false)
    + text(30, 22, b.text, 'name') + text(30, 38, value ? `${value} · ${b.sub}` : b.sub, 'soft')
    + (repeat ? times(w - 10, 9, b.item.items.length) : '') + composition(b, w, h)
}
/** A chip with a count that ends at x. */
function times(x, y, n) {
  const w = textWidth(`× ${n}`, '650 11px system-ui, sans-serif') + 16
  return box({x: x - w, y, width: w, height: 18, rx: 9}, 'chip') + text(x - w / 2, y + 13, `× ${n}`, 'badge')
}
/** The heading of a repeat: its number of layers, and arrows from one layer to the next. */
function stepper(b) {
  const right = b.w - 12, count = b.item.items.length
  const step = (x, arrow, by) => tag('g', {class: 'step', 'data-step': by}, box({x, y: 6, width: 22, height: 20, rx: 6}, ''), text(x + 8, 20, arrow))
  return step(right - 22, '›', 1) + step(right - 116, '‹', -1) + text(right - 58, 20, `${b.layer + 1} of ${count}`, 'soft middle')
    + times(right - 124, 7, count)
}
/** The kinds of operators in a group, as a bar. */
function composition(b, w, h) {
  const counts = new Map
  for (const i of b.leaves) counts.set(kindOf(i), (counts.get(kindOf(i)) ?? 0) + 1)
  let x = 12
  return [...counts].sort((a, c) => c[1] - a[1]).map(([kind, n]) => {
    const wide = (w - 24) * n / b.leaves.length
    x += wide
    return tag('rect', {x: x - wide, y: h - 10, width: Math.max(1, wide - 1), height: 4, rx: 1.5, style: `fill:var(--${kind})`})
  }).join('')
}
function legend() {
  const {name, of, text} = MODES[mode]
  if (of) { $('legend').innerHTML = `<span>0<i class="ramp"></i>${text(hottest)}</span><span>${name} of a node</span>`; return }
  const rows = mode === 'sharding' ? shardings.map((s, k) => [HUES[k % HUES.length], s])
    : [...new Set(nodes.filter(n => !n.folded).map(n => operators[n.type].kind))].sort().map(k => [k, LEGEND[k] ?? k])
  $('legend').innerHTML = rows.map(([kind, text]) => `<span>${dot(kind)}${escaped(text)}</span>`).join('')
}
const LEGEND = {
  product: 'products, recurrence', norm: 'normalisation', pool: 'pooling, reduction', shape: 'shapes, indexing', quant: 'quantisation',
}

// ---------------------------------------------------------------- view

const at = {x: 0, y: 0, k: 1}
let moving = 0
function look() {
  view.setAttribute('transform', `translate(${at.x},${at.y}) scale(${at.k})`)
  sheet.classList.toggle('far', at.k < 0.28)
  drawMap()
}
/** The part of the window that nothing covers. */
function room() {
  const narrow = innerWidth <= 640, side = panel.hidden || narrow ? 0 : 372
  const below = narrow && !panel.hidden ? innerHeight * 0.5 : 0
  return {x: 16, y: narrow ? 108 : 74, w: innerWidth - 32 - side, h: innerHeight - (narrow ? 160 : 110) - below}
}
function aim({x, y, w, h}, least = 0, most = 1.1) {
  const r = room(), k = Math.max(least, Math.min(most, r.w / w, r.h / h))
  const tall = h * k > r.h
  return {k, x: r.x + (r.w - w * k) / 2 - x * k, y: tall ? r.y - y * k : r.y + (r.h - h * k) / 2 - y * k}
}
function fly(goal) {
  const from = {...at}, start = performance.now(), turn = ++moving
  if (matchMedia('(prefers-reduced-motion: reduce)').matches || document.hidden) { Object.assign(at, goal); return look() }
  const step = now => {
    if (turn !== moving) return
    const t = Math.min(1, Math.max(0, now - start) / 320), s = 1 - (1 - t) ** 3
    for (const n of ['x', 'y', 'k']) at[n] = from[n] + (goal[n] - from[n]) * s
    look()
    if (t < 1) requestAnimationFrame(step)
  }
  requestAnimationFrame(step)
}
const whole = () => ({x: 0, y: 0, w: root.w, h: root.h})
const fit = () => fly(aim(whole()))
function zoom(factor, x = innerWidth / 2, y = innerHeight / 2) {
  const k = Math.min(4, Math.max(0.03, at.k * factor))
  moving++
  at.x = x - (x - at.x) * k / at.k, at.y = y - (y - at.y) * k / at.k, at.k = k
  look()
}
function drawMap() {
  const wide = 168, ratio = devicePixelRatio || 1, scale = Math.min(wide / (root.w || 1), 120 / (root.h || 1))
  const h = Math.max(40, root.h * scale), left = (wide - root.w * scale) / 2, top = (h - root.h * scale) / 2
  map.style.width = `${wide}px`, map.style.height = `${h}px`
  map.width = wide * ratio, map.height = h * ratio
  const ink = map.getContext('2d'), style = getComputedStyle(document.documentElement)
  ink.scale(ratio, ratio)
  root.each(b => {
    if (b === root) return
    const {x, y} = b.absolute
    ink.globalAlpha = b.open ? 0.12 : 0.75
    const hue = b.open ? 'ink' : isPort(b) ? 'port' : b.rows.length ? kindOf(b.rows[0]) : 'soft'
    ink.fillStyle = style.getPropertyValue(`--${hue}`)
    ink.fillRect(left + x * scale, top + y * scale, Math.max(1, b.w * scale), Math.max(1, b.h * scale))
  })
  ink.globalAlpha = 1, ink.strokeStyle = style.getPropertyValue('--accent'), ink.lineWidth = 1.5
  ink.strokeRect(left - at.x / at.k * scale, top - at.y / at.k * scale, innerWidth / at.k * scale, innerHeight / at.k * scale)
  map.scaled = {scale, left, top}
}

/** Opens or closes a block; it keeps its place in the window. */
function toggle(id, open = !opened.has(id)) {
  const before = blocks.get(id)?.absolute
  open ? opened.add(id) : opened.delete(id)
  build()
  const now = blocks.get(id)?.absolute
  if (before && now) {
    at.x += ((before.x + before.w / 2) - (now.x + now.w / 2)) * at.k
    at.y += (before.y - now.y) * at.k
  }
  draw(), look()
  if (now && open) {
    const r = room(), x = now.x * at.k + at.x, y = now.y * at.k + at.y
    const inside = x >= r.x && y >= r.y && x + now.w * at.k <= r.x + r.w && y + now.h * at.k <= r.y + r.h
    if (!inside) fly(aim(now, Math.min(at.k, 0.55), Math.max(at.k, 0.4)))
  }
}
/** Opens scopes, level by level and the smaller ones first, while the blocks of the view are few; parts all or none. */
function opening(most) {
  const inside = b => {
    opened.add(b.id)
    const count = new Block(b.item, b.parent, b.id, b.g, b.env).children.length
    opened.delete(b.id)
    return count - 1
  }
  for (;;) {
    const all = [...blocks.values()], closed = all.filter(b => b.opens && !b.open), depth = b => b.id.split('/').length
    const least = Math.min(...closed.map(depth)), level = closed.filter(b => depth(b) === least)
    let space = most - all.filter(b => !b.open).length
    const sizes = new Map(level.map(b => [b, inside(b)])), sum = list => list.reduce((n, b) => n + sizes.get(b), 0)
    const parts = level.filter(b => b.kind === 'part'), others = level.filter(b => b.kind !== 'part')
    const chosen = others.sort((a, b) => sizes.get(a) - sizes.get(b)).filter(b => (space -= sizes.get(b)) >= 0 || all.length <= 6)
    if (sum(parts) <= space) chosen.push(...parts)
    if (!chosen.length) return
    chosen.forEach(b => opened.add(b.id))
    build()
    if (chosen.length < level.length) return
  }
}
