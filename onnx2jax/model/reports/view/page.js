// Finds nodes, searches, and answers the pointer and the keyboard.

// ---------------------------------------------------------------- finding

/** Opens what is around a node, and returns the id of its block. */
function reveal(i) {
  let prefix = ''
  const g = nodes[i].graph
  if (owners.has(g)) {
    const owner = owners.get(g), id = reveal(owner)
    opened.add(id)
    prefix = id
    if (nodes[owner].graphs.length > 1) {
      prefix = `${id}/${nodes[owner].graphs.findIndex(([, inner]) => inner === g)}`
      opened.add(prefix)
    }
  }
  const walk = (items, prefix) => {
    for (let k = 0; k < items.length; k++) {
      const item = items[k], id = `${prefix}/${k}`
      if (item === i) return id
      if (item.items && leaves(item).includes(i)) {
        if (item.kind === 'stack') return id
        opened.add(id)
        if (item.kind !== 'repeat') return walk(item.items, id)
        const layer = item.items.findIndex(l => leaves(l).includes(i))
        layerOf.set(id, layer)
        return walk(item.items[layer].items, `${id}:${layer}`)
      }
    }
  }
  return walk(graphs[g].items, prefix)
}
/** The node itself, or the first drawn node that reads what a folded one computes. */
function drawnReader(i) {
  const seen = new Set, pending = [i]
  while (pending.length) {
    const node = pending.shift()
    if (!nodes[node].folded) return node
    if (seen.has(node)) continue
    seen.add(node)
    for (const n of nodes[node].outputs) pending.push(...(facts[nodes[node].graph].readers.get(n) ?? []))
  }
  return null
}
function goTo(i) {
  const target = drawnReader(i)
  if (target === null) return choose({node: i})
  const id = reveal(target)
  build(), draw()
  choose({node: i, at: target})
  const b = blocks.get(id)
  fly(aim(b.absolute, 0.9, 1.1))
  flash(id)
}
function goToPort(name, kind) {
  const b = [...blocks.values()].find(b => b.kind === kind && b.item.values.includes(name) && b.parent === root)
  if (b) { choose({port: b.id}); fly(aim(b.absolute, 0.9, 1.1)); flash(b.id) }
}
function goToValue(name, g) {
  for (let at = g; at !== undefined; at = owners.has(at) ? nodes[owners.get(at)].graph : undefined) {
    if (facts[at].producers.has(name)) return goTo(facts[at].producers.get(name))
    if (graphs[at].items.some(item => item.kind === 'input' && item.values.includes(name))) return at || goToPort(name, 'input')
  }
}
function flash(id) {
  const block = elementOf(id), row = chosen?.at !== undefined && block?.querySelector(`[data-node="${chosen.at}"]`)
  ;(row || block)?.classList.add('flash')
}

// ---------------------------------------------------------------- search

let entries
function index() {
  if (entries) return entries
  entries = []
  const add = (title, name, kind, go) => entries.push({title, name, kind, go, text: `${title} ${name}`.toLowerCase()})
  for (const [name, type] of data.inputs) add('input', name, 'port', () => goToPort(name, 'input'))
  for (const [name, type] of data.outputs) add('output', name, 'port', () => goToPort(name, 'output'))
  nodes.forEach((node, i) => add(opOf(i), node.name, kindOf(i), () => goTo(i)))
  graphs.forEach((graph, g) => {
    for (const [name, value] of Object.entries(graph.values)) {
      const reader = facts[g].readers.get(name)?.[0]
      if (value.parameter && reader !== undefined) add('parameter', name, 'norm', () => goTo(reader))
    }
    for (const [name, i] of facts[g].producers) if (name !== nodes[i].name) add('value', name, 'shape', () => goTo(i))
  })
  return entries
}
let hits = [], cursor = 0
function seek() {
  const text = $('search').value.trim().toLowerCase(), words = text.split(/\s+/)
  const rank = e => {  // equal, then as a beginning; the whole name or its last part
    const title = e.title.toLowerCase(), name = e.name.toLowerCase(), last = name.slice(name.lastIndexOf('/') + 1)
    const tests = [title === text, name === text || last === text, title.startsWith(text), name.startsWith(text) || last.startsWith(text)]
    return tests.includes(true) ? tests.indexOf(true) : tests.length
  }
  const matching = text ? index().filter(e => words.every(w => e.text.includes(w))) : [], ranks = new Map(matching.map(e => [e, rank(e)]))
  hits = matching.sort((a, b) => ranks.get(a) - ranks.get(b))
  cursor = 0
  hint()
}
function hint() {
  const open = $('search').value.trim() !== '' && document.activeElement === $('search')
  $('hints').hidden = !open
  const start = Math.max(0, Math.min(cursor - 8, hits.length - 40))
  const rows = hits.slice(start, start + 40).map((e, k) => tag('li', {'data-hit': start + k, 'aria-selected': start + k === cursor},
    dot(e.kind), tag('b', {}, escaped(e.title)), tag('span', {}, escaped(e.name))))
  const about = hits.length > 40 ? `${grouped(hits.length)} matches` : hits.length ? '' : 'nothing found'
  $('hints').innerHTML = rows.join('') + (about && tag('li', {class: 'none'}, about))
  $('hints').querySelector('[aria-selected=true]')?.scrollIntoView({block: 'nearest'})
}

// ---------------------------------------------------------------- events

function clicked({target, x, y}) {
  const g = target.closest('.block'), step = target.closest('.step'), row = target.closest('.row')
  if (!g) return choose(null)
  const b = blocks.get(g.dataset.id)
  if (step) {
    const count = b.item.items.length, top = b.absolute
    layerOf.set(b.id, (b.layer + +step.dataset.step + count) % count)
    return toggle(b.id, true), choose({block: b.id})
  }
  if (b.kind === 'input' || b.kind === 'output') return choose({port: b.id})
  if (b.opens) {
    const what = b.inner.length ? {node: b.node} : {block: b.id}, heading = (y - at.y) / at.k - b.absolute.y < HEAD
    if (b.open && !heading) return choose(what)
    if (!panel.hidden) choose(what)
    return toggle(b.id)
  }
  choose({node: row ? +row.dataset.node : b.rows[0]})
}
const pointers = new Map
let pressed = null, apart = 0
sheet.addEventListener('pointerdown', e => {
  if (e.button) return
  sheet.focus({preventScroll: true})
  pointers.set(e.pointerId, e), pressed = {x: e.clientX, y: e.clientY, target: e.target, moved: pointers.size > 1}
  moving++
})
addEventListener('pointermove', e => {
  const before = pointers.get(e.pointerId)
  if (!before) return
  const other = [...pointers.values()].find(p => p.pointerId !== e.pointerId)
  if (other) {
    const span = p => Math.hypot(p.clientX - other.clientX, p.clientY - other.clientY)
    zoom(span(e) / (span(before) || 1), (e.clientX + other.clientX) / 2, (e.clientY + other.clientY) / 2)
  }
  if (pressed && Math.hypot(e.clientX - pressed.x, e.clientY - pressed.y) > 4) pressed.moved = true
  if (pressed?.moved) {
    at.x += (e.clientX - before.clientX) / pointers.size, at.y += (e.clientY - before.clientY) / pointers.size
    sheet.classList.add('drag'), look()
  }
  pointers.set(e.pointerId, e)
})
const lift = e => {
  if (!pointers.delete(e.pointerId)) return
  sheet.classList.remove('drag')
  if (pressed && !pressed.moved && e.type === 'pointerup') clicked(pressed)
  if (!pointers.size) pressed = null
}
addEventListener('pointerup', lift), addEventListener('pointercancel', lift)
sheet.addEventListener('wheel', e => {
  if (self !== top && !engaged && !e.ctrlKey) return  // in a notebook, the wheel scrolls until the first click
  e.preventDefault()
  const unit = e.deltaMode ? 16 : 1
  zoom(Math.exp(-e.deltaY * unit * (e.ctrlKey ? 0.01 : 0.0016)), e.clientX, e.clientY)
}, {passive: false})
const jump = e => {
  if (!e.buttons) return
  const box = map.getBoundingClientRect(), {scale, left, top} = map.scaled
  moving++
  at.x = innerWidth / 2 - (e.clientX - box.x - left) / scale * at.k
  at.y = innerHeight / 2 - (e.clientY - box.y - top) / scale * at.k
  look()
}
map.addEventListener('pointerdown', jump), map.addEventListener('pointermove', jump)
panel.addEventListener('click', e => {
  const link = e.target.closest('a, .close')
  if (!link) return
  if (link.classList.contains('close')) choose(null)
  else if (link.dataset.goto) goTo(+link.dataset.goto)
  else if (link.dataset.value) goToValue(link.dataset.value, +link.dataset.graph)
})
$('search').addEventListener('input', seek)
$('search').addEventListener('focus', seek)
$('search').addEventListener('blur', () => setTimeout(hint, 150))
$('search').addEventListener('keydown', e => {
  const step = {ArrowDown: 1, ArrowUp: hits.length - 1}[e.key]
  if (step !== undefined) { e.preventDefault(); cursor = (cursor + step) % (hits.length || 1); hint() }
  if (e.key === 'Enter' && hits.length) { hits[cursor].go(); $('search').blur() }
  if (e.key === 'Escape') { $('search').value = ''; $('search').blur() }
  e.stopPropagation()
})
$('hints').addEventListener('mousedown', e => {
  const hit = e.target.closest('[data-hit]')
  e.preventDefault()
  if (hit) { hits[+hit.dataset.hit].go(); $('search').blur() }
})
const everything = open => {
  if (!open) opened.clear()
  build()
  for (let more = open; more;) {
    more = [...blocks.values()].filter(b => b.opens && !b.open && b.id.split('/').length < 40)
    more.forEach(b => opened.add(b.id))
    if (!more.length || blocks.size > 8000) break
    build()
  }
  draw(), fly(aim(whole(), open ? 0.4 : 0))
}
function neighbour(up) {
  const node = chosen?.at ?? chosen?.node
  if (node === undefined) return false
  const {producers, readers} = facts[nodes[node].graph]
  const next = up ? reads(node).map(n => producers.get(n)).find(i => i !== undefined && !nodes[i].folded)
    : nodes[node].outputs.flatMap(n => readers.get(n) ?? []).find(i => !nodes[i].folded)
  if (next !== undefined) goTo(next)
  return true
}
function dark(on) { document.documentElement.dataset.theme = on ? 'dark' : 'light'; drawMap() }
function toggleChosen() {
  const ofNode = b => b.opens && b.node !== null && b.node === chosen?.node
  const b = blocks.get(chosen?.block) ?? [...blocks.values()].find(ofNode)
  if (b) toggle(b.id)
}
const keys = {
  '/': () => $('search').focus(), f: fit, '+': () => zoom(1.3), '=': () => zoom(1.3), '-': () => zoom(1 / 1.3),
  e: () => everything(true), c: () => everything(false), Enter: toggleChosen, Escape: () => choose(null),
  i: () => choose(chosen?.model ? null : {model: true}), '?': () => choose({keys: true}),
  t: () => dark(document.documentElement.dataset.theme !== 'dark'),
  ArrowLeft: () => { at.x += 80; look() }, ArrowRight: () => { at.x -= 80; look() },
  ArrowUp: () => neighbour(true) || (at.y += 80, look()), ArrowDown: () => neighbour(false) || (at.y -= 80, look()),
}
addEventListener('keydown', e => {
  const {tagName} = document.activeElement
  if (e.key === 'k' && (e.ctrlKey || e.metaKey)) { e.preventDefault(); $('search').focus() }
  if (e.ctrlKey || e.metaKey || e.altKey || ['INPUT', 'SELECT'].includes(tagName) || (e.key === 'Enter' && tagName === 'BUTTON')) return
  if (keys[e.key]) { e.preventDefault(); keys[e.key]() }
})
const BUTTONS = {model: 'i', unfold: 'e', fold: 'c', theme: 't', fit: 'f', in: '+', out: '-', help: '?'}
for (const [id, key] of Object.entries(BUTTONS)) $(id).addEventListener('click', () => keys[key]())
let engaged = false
addEventListener('pointerdown', () => { engaged = true }, true)
let touched = false  // until then, the first view follows the size of the window, which a frame learns late
for (const event of ['pointerdown', 'wheel', 'keydown']) addEventListener(event, () => { touched = true }, true)
addEventListener('resize', () => { if (!touched) { moving++; Object.assign(at, beginning()) } look() })

// ---------------------------------------------------------------- start

const modes = Object.entries(MODES).filter(([, m]) => m.has())
$('colour').innerHTML = modes.map(([id, m]) => `<option value="${id}">${m.name}</option>`).join('')
$('colour').value = mode
$('tint').hidden = modes.length < 2
$('colour').addEventListener('change', () => { mode = $('colour').value; draw() })
const line = [`${grouped(nodes.length)} nodes`, `${number(data.parameters)} parameters`, data.flops && `${number(data.flops)} FLOPs`]
$('model').innerHTML = tag('b', {}, escaped(data.title)) + tag('span', {}, line.filter(Boolean).join(' · '))
build(), opening(FIRST), draw()
dark(matchMedia('(prefers-color-scheme: dark)').matches)
Object.assign(at, beginning()), look()
/** The first view: all of a small graph, else its width and upper end, at a scale at which one can read. */
function beginning() {
  const narrow = innerWidth <= 640, least = narrow ? 0.5 : 0.6, r = room()
  const goal = aim(whole(), Math.max(least, Math.min(0.85, r.w / root.w)))
  const first = blocks.get('/0')
  if (root.w * goal.k > r.w && first) goal.x = r.x + r.w / 2 - (first.x + first.w / 2) * goal.k
  return goal
}
const differing = nodes.findIndex(n => n.differs)
if (differing >= 0) goTo(differing)
