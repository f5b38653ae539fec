// Draws the blocks: colours, SVG, the view that moves and zooms, and its map.

// ---------------------------------------------------------------- colours

const MODES = {
  operator: {name: 'operators', has: () => true},
  seconds: {name: 'time', has: () => data.time, of: list => total(list, 'seconds'), text: seconds},
  flops: {name: 'FLOPs', has: () => data.flops, of: list => total(list, 'flops'), text: number},
  bytes: {name: 'bytes', has: () => data.flops !== undefined, of: list => total(list, 'bytes'), text: number},
  parameters: {name: 'parameters', has: () => data.flops !== undefined && data.parameters, of: list => total(list, 'parameters'), text: number},
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
  return {fill: value ? `color-mix(in srgb, var(--hot) ${f(72 * Math.sqrt(value / hottest))}%, var(--card))` : null, text: value ? text(value) : ''}
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
const drawnInside = block => block.edges.map(edge => `<path class="edge${edge.back ? ' back' : ''}" d="${curve(edge)}"/>`).join('')
  + block.children.map(drawn).join('') + block.children.map(labelled).join('')

/** The types of what a block computes, in a few words. */
function labelOf(b) {
  if (b.kind === 'output') return ''
  const types = [...new Set(io(b.item, b.g).writes.map(n => shape(typeOf(n, b.g).type)).filter(Boolean))]
  return types.length ? short(types[0], 30) + (types.length > 1 ? ` +${types.length - 1}` : '') : ''
}
function labelled(b) {
  const text = labelOf(b)
  return text && `<text class="label" x="${f(b.x + b.w / 2)}" y="${f(b.y + b.h + 15)}">${escaped(text)}</text>`
}
const chevron = (x, y, open) => `<path class="chevron" d="${open ? `M${x - 4} ${y - 2}l4 4l4 -4` : `M${x - 2} ${y - 4}l4 4l-4 4`}"/>`

function drawn(b) {
  const at = `data-id="${b.id}" transform="translate(${f(b.x)},${f(b.y)})"`, {w} = b, h = b.h - (b.kind === 'repeat' && !b.open ? SHEETS : 0)
  const trouble = troubles(b.leaves)
  const spot = trouble && !b.open ? `<circle class="mark" cx="${f(w - 2)}" cy="2" r="5" fill="var(--${trouble})"/>` : ''
  if (b.kind === 'input' || b.kind === 'output')
    return `<g class="block port" ${at}><rect class="card" width="${f(w)}" height="${h}" rx="12"/><text x="15" y="16.5">${escaped(b.text)}</text></g>`
  if (b.open) {
    const name = `<text class="name" x="30" y="20">${escaped(cut(b.title, 60))}</text>`
    const many = b.kind === 'repeat' ? stepper(b) : ''
    return `<g class="block group" ${at}><rect class="card" width="${f(w)}" height="${f(h)}" rx="12"/>${drawnInside(b)}${chevron(16, 16, true)}${name}${many}</g>`
  }
  const {fill, text} = tint(b.leaves)
  if (b.rows.length) {
    const rows = b.rows.map((i, k) => {
      const own = b.rows.length > 1 ? tint([i]) : {fill, text}
      const y = k * ROW, aside = own.text || b.details[k], rounded = b.rows.length === 1 ? 8 : 0
      return `<g class="row" data-node="${i}" style="--kind:var(--${kindOf(i)})"><rect class="hit" x="0.7" y="${y + 0.7}" width="${f(w - 1.4)}" height="${ROW - 1.4}" rx="${rounded || 6}"${own.fill ? ` style="fill:${own.fill}"` : ''}/>`
        + `<rect x="8" y="${y + 7}" width="4" height="${ROW - 14}" rx="2" class="stripe"/>`
        + `<text class="name" x="20" y="${y + 17.5}">${escaped(opOf(i))}</text>`
        + (aside ? `<text class="${own.text ? '' : 'soft '}end" x="${f(w - (b.opens ? 26 : 11))}" y="${y + 17}">${escaped(aside)}</text>` : '')
        + (k ? `<path class="rule" d="M8 ${y}H${f(w - 8)}"/>` : '') + '</g>'
    }).join('')
    return `<g class="block" ${at}><rect class="card" width="${f(w)}" height="${h}" rx="8"/>${rows}${b.opens ? chevron(w - 14, ROW / 2, false) : ''}${spot}</g>`
  }
  const sheets = b.kind === 'repeat' ? [8, 4].map(d => `<rect class="sheet" x="${d}" y="${d}" width="${f(w)}" height="${h}" rx="9"/>`).join('') : ''
  const badge = b.kind === 'repeat' ? times(w - 10, 9, b.item.items.length) : ''
  return `<g class="block" ${at}>${sheets}<rect class="card" width="${f(w)}" height="${h}" rx="9"${fill ? ` style="fill:${fill}"` : ''}/>${chevron(16, 18, false)}`
    + `<text class="name" x="30" y="22">${escaped(b.text)}</text><text class="soft" x="30" y="38">${escaped(text ? `${text} · ${b.sub}` : b.sub)}</text>${badge}${composition(b, w, h)}${spot}</g>`
}
/** A chip with a count that ends at x. */
function times(x, y, n) {
  const w = textWidth(`× ${n}`, '650 11px system-ui, sans-serif') + 16
  return `<rect class="chip" x="${f(x - w)}" y="${y}" width="${f(w)}" height="18" rx="9"/><text class="badge" x="${f(x - w / 2)}" y="${y + 13}">× ${n}</text>`
}
function stepper(b) {
  const right = b.w - 12, count = b.item.items.length
  const step = (x, text, by) => `<g class="step" data-step="${by}"><rect x="${f(x)}" y="6" width="22" height="20" rx="6"/><text x="${f(x + 8)}" y="20">${text}</text></g>`
  return step(right - 22, '›', 1) + step(right - 116, '‹', -1) + `<text class="soft" x="${f(right - 58)}" y="20" style="text-anchor:middle">${b.layer + 1} of ${count}</text>`
    + times(right - 124, 7, count)
}
function composition(b, w, h) {
  const counts = new Map
  for (const i of b.leaves) counts.set(kindOf(i), (counts.get(kindOf(i)) ?? 0) + 1)
  let x = 12
  return [...counts].sort((a, c) => c[1] - a[1]).map(([kind, n]) => {
    const wide = (w - 24) * n / b.leaves.length, part = `<rect x="${f(x)}" y="${h - 10}" width="${f(Math.max(1, wide - 1))}" height="4" rx="1.5" style="fill:var(--${kind})"/>`
    x += wide
    return part
  }).join('')
}
function legend() {
  const {name, of, text} = MODES[mode]
  if (of) { $('legend').innerHTML = `<span>0<i class="ramp"></i>${text(hottest)}</span><span>${name} of a node</span>`; return }
  const rows = mode === 'sharding' ? shardings.map((s, k) => [HUES[k % HUES.length], s])
    : [...new Set(nodes.filter(n => !n.folded).map(n => operators[n.type].kind))].sort().map(k => [k, LEGEND[k] ?? k])
  $('legend').innerHTML = rows.map(([kind, text]) => `<span>${dot(kind)}${escaped(text)}</span>`).join('')
}
const LEGEND = {product: 'products, recurrence', norm: 'normalisation', pool: 'pooling, reduction', shape: 'shapes, indexing', quant: 'quantisation'}

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
  return {x: 16, y: narrow ? 108 : 74, w: innerWidth - 32 - side, h: innerHeight - (narrow ? 160 : 110) - (narrow && !panel.hidden ? innerHeight * 0.5 : 0)}
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
    ink.fillStyle = style.getPropertyValue(b.open ? '--ink' : b.kind === 'input' || b.kind === 'output' ? '--port' : b.rows.length ? `--${kindOf(b.rows[0])}` : '--soft')
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
    if (x < r.x || y < r.y || x + now.w * at.k > r.x + r.w || y + now.h * at.k > r.y + r.h) fly(aim(now, Math.min(at.k, 0.55), Math.max(at.k, 0.4)))
  }
}
/** Opens scopes while the blocks of the view are few. */
function opening(most) {
  for (;;) {
    const closed = [...blocks.values()].filter(b => b.opens && !b.open)
    const least = Math.min(...closed.map(b => b.id.split('/').length))
    const level = closed.filter(b => b.id.split('/').length === least)
    const size = [...blocks.values()].filter(b => !b.open).length
    const more = b => { opened.add(b.id); const inside = new Block(b.item, b.parent, b.id, b.g, b.env).children.length; opened.delete(b.id); return inside - 1 }
    const fits = level.map(b => [b, more(b)]).sort((a, c) => a[1] - c[1])
    let room = most - size
    const chosen = fits.filter(([b, n]) => (room -= n) >= 0 || blocks.size <= 6)
    if (!chosen.length) return
    chosen.forEach(([b]) => opened.add(b.id))
    build()
    if (chosen.length < level.length) return
  }
}
