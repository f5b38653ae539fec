// The panel: facts of a node, a block, an input or output, or of the model.

/** Selects a node ({node, at: the drawn node}), a block ({block}), a port ({port}); null closes the panel. */
function choose(what) {
  chosen = what
  panel.hidden = !what
  if (what) {
    const close = tag('button', {class: 'close', title: 'close (Esc)', 'aria-label': 'close'}, '×')
    panel.innerHTML = close + (what.model ? aboutModel() : what.keys ? aboutKeys()
      : what.node !== undefined ? aboutNode(what.node) : aboutBlock(blocks.get(what.block ?? what.port)))
    panel.scrollTop = 0
    panel.querySelectorAll('canvas').forEach(paint)
  }
  mark()
}

/** Marks the selected block, and its edges. */
function mark() {
  view.querySelectorAll('.chosen, .lit').forEach(e => e.classList.remove('chosen', 'lit'))
  if (!chosen) return
  const id = chosen.block ?? chosen.port, node = chosen.at ?? chosen.node
  const element = id !== undefined ? elementOf(id) : view.querySelector(`[data-node="${node}"]`)
  element?.classList.add('chosen')
  const b = blocks.get(id ?? element?.closest('[data-id]')?.dataset.id), group = b?.parent
  if (!group?.edges) return
  const k = group.children.indexOf(b), paths = [...elementOf(group.id).children].filter(e => e.classList.contains('edge'))
  group.edges.forEach((edge, e) => (edge.from === k || edge.to === k) && paths[e]?.classList.add('lit'))
}

// ---------------------------------------------------------------- pieces

const soft = (...inside) => tag('p', {class: 'soft'}, ...inside)
const section = (title, inside) => inside ? tag('h3', {}, title) + inside : ''
const list = rows => tag('dl', {}, ...rows.map(([name, value]) => tag('dt', {}, escaped(name)) + tag('dd', {}, escaped(value))))
const grouped = n => n.toLocaleString('en')
const some = (names, most) => names.slice(0, most).join(', ') + (names.length > most ? ` and ${names.length - most} more` : '')
const heading = (title, kind) => tag('h2', {}, kind ? dot(kind) : '', escaped(title))
const alert = (text, severity, fix) => tag('div', {class: `alert ${severity}`}, text, fix ? tag('div', {class: 'soft'}, escaped(fix)) : '')
const rule = x => alert(`<b>${escaped(x.rule)}</b> ${escaped(x.message)}`, x.severity, x.fix)
/** Numbers with their names; those that are not known are left out. */
const tiles = rows => tag('div', {class: 'tiles'}, ...rows.filter(([value]) => value)
  .map(([value, name]) => tag('div', {}, escaped(value), tag('span', {}, name))))
const known = (value, text = number) => value && text(value)

/** Range, mean, zeros and NaN of a value, with its histogram or picture. */
function figuresOf({figures, histogram, picture}) {
  if (!figures) return ''
  const {min, max, mean, zeros, nan, inf, sample} = figures
  const bad = text => tag('b', {class: 'bad'}, text)
  const words = [
    mean !== undefined && `mean ${mean}`, zeros && `${+(100 * zeros).toPrecision(3)} % zeros`, nan && bad(`${grouped(nan)} NaN`),
    inf && bad(`${grouped(inf)} infinite`), sample && `of ${grouped(sample)} elements`,
  ].filter(Boolean).join(' · ')
  const bars = histogram?.map((h, x) => tag('rect', {x: x + 0.08, y: 100 - h, width: 0.84, height: h})) ?? []
  return (picture ? tag('canvas', {'data-picture': JSON.stringify(picture)}) : '')
    + (bars.length ? tag('svg', {class: 'bars', viewBox: `0 0 ${bars.length} 100`, preserveAspectRatio: 'none'}, ...bars) : '')
    + tag('div', {class: 'scale'}, ...[min, words, max].map(text => tag('span', {}, text ?? '')))
}

/** Colours of a picture's bytes: NaN, from blue over white to red, or from violet over green to yellow. */
function colour(byte, signed) {
  if (byte === 255) return [255, 0, 200]
  const t = byte / 254, mix = (a, b, s) => a.map((v, k) => v + (b[k] - v) * s)
  const [low, middle, high] = signed ? [[41, 98, 218], [255, 255, 255], [209, 61, 47]] : [[68, 1, 84], [33, 145, 140], [253, 231, 37]]
  return t < 0.5 ? mix(low, middle, 2 * t) : mix(middle, high, 2 * t - 1)
}
function paint(canvas) {
  const {width, height, signed, data} = JSON.parse(canvas.dataset.picture)
  const wide = Math.min(324, Math.max(120, width * 8))
  canvas.width = width, canvas.height = height
  canvas.style.width = `${wide}px`, canvas.style.height = `${Math.max(14, Math.min(220, wide * height / width))}px`
  const ink = canvas.getContext('2d'), image = ink.createImageData(width, height)
  for (let k = 0, bytes = atob(data); k < bytes.length; k++) image.data.set([...colour(bytes.charCodeAt(k), signed), 255], 4 * k)
  ink.putImageData(image, 0, 0)
}

/** A value: its name, type, and what is known of its elements. */
function aboutValue(name, role, g, ...more) {
  const v = typeOf(name, g), producer = facts[g].producers.get(name), extents = v.shape?.join(', ')
  const words = [v.type, extents && !v.type?.includes(`[${extents}]`) && `here [${extents}]`, v.bytes > 64 && `${number(v.bytes)}B`, v.sharding]
  return tag('div', {class: 'value'},
    tag('div', {class: 'head'},
      tag('a', {class: 'mono', 'data-value': name, 'data-graph': g}, escaped(name)), tag('span', {class: 'role'}, escaped(role))),
    tag('div', {class: 'mono soft'}, escaped(words.filter(Boolean).join(' · '))),
    v.value === undefined ? '' : tag('div', {class: 'mono'}, `= ${escaped(v.value)}`),
    v.differs ? alert(`differs: ${escaped(v.differs)}`, 'error') : '',
    producer !== undefined && nodes[producer].folded ? tag('div', {class: 'soft'}, `folded: ${links(foldedBehind(producer)).join(' → ')}`) : '',
    figuresOf(v), ...more)
}
const links = list => list.map(i => tag('a', {'data-goto': i}, escaped(opOf(i))))

/** The folded nodes that a folded node's result is computed by, in order. */
function foldedBehind(i, found = []) {
  if (found.includes(i) || found.length >= 40) return found
  for (const name of reads(i)) {
    const producer = facts[nodes[i].graph].producers.get(name)
    if (producer !== undefined && nodes[producer].folded) foldedBehind(producer, found)
  }
  if (!found.includes(i)) found.push(i)
  return found
}

/** Operators by number of nodes, as bars. */
function shares(all) {
  const counts = new Map
  for (const i of all) counts.set(opOf(i), {n: (counts.get(opOf(i))?.n ?? 0) + 1, kind: kindOf(i)})
  const rows = [...counts].sort((a, b) => b[1].n - a[1].n), most = rows[0]?.[1].n
  const bars = rows.slice(0, 14).map(([name, {n, kind}]) => tag('span', {}, escaped(name)) + tag('span', {class: 'soft'}, n)
    + tag('i', {style: `width:${f(100 * n / most)}%;background:var(--${kind})`}))
  return tag('div', {class: 'share'}, ...bars) + (rows.length > 14 ? soft(`${rows.length - 14} more operators`) : '')
}

// ---------------------------------------------------------------- what the panel is about

function aboutNode(i) {
  const node = nodes[i], op = operators[node.type], opset = node.type.split(':').at(-1), names = op.inputs ?? []
  const readBy = name => links(facts[node.graph].readers.get(name) ?? [])
  const inputs = node.inputs.map((name, k) => name && aboutValue(name, names[k] ?? op.variadic ?? '', node.graph))
  const captures = [...new Set(node.captures)].map(name => aboutValue(name, 'captured', node.graph))
  const outputs = node.outputs.map(name => name && aboutValue(name, '', node.graph,
    readBy(name).length ? tag('div', {class: 'soft'}, `read by ${some(readBy(name), 8)}`) : ''))
  return heading(op.name, op.kind)
    + soft(`${escaped(op.domain || 'ai.onnx')} ${opset}`, op.since && op.since !== +opset ? `, since ${op.since}` : '',
      node.folded ? ' · folded into its reader' : '', node.host ? ' · on the host' : '')
    + (op.document ? tag('p', {}, escaped(op.document)) : '') + tag('p', {}, tag('code', {}, escaped(node.name)))
    + (node.differs ? alert(`<b>First node that differs</b> from ${escaped(data.against)}: ${escaped(node.differs)}`, 'error') : '')
    + (node.findings ?? []).map(rule).join('')
    + tiles([[known(node.seconds, seconds), `time, ${number(100 * (node.share ?? 0))} %`],
      [node.flops === null ? 'host' : known(node.flops), 'FLOPs'], [known(node.bytes), 'bytes moved'], [known(node.parameters), 'parameters']])
    + (node.fused ? soft('XLA fuses with it: ', tag('span', {class: 'mono'}, escaped(some(node.fused, 8)))) : '')
    + section('Attributes', node.attributes && list(Object.entries(node.attributes)))
    + section('Inputs', inputs.join('')) + section('Captures', captures.join('')) + section('Outputs', outputs.join(''))
    + section('Signature', op.signature && tag('code', {}, escaped(op.signature))) + (op.limits ? soft(escaped(op.limits)) : '')
}

const KINDS = {
  scope: 'scope', part: 'consecutive nodes', repeat: 'repeated layers, drawn once', graph: 'graph', layer: 'layer', node: 'node with graphs',
}
function aboutBlock(b) {
  if (isPort(b)) {
    const values = b.item.values, many = values.length > 1 ? `s, ${values.length}` : ''
    return heading(b.title, 'port') + soft(b.kind + many) + values.slice(0, 100).map(name => aboutValue(name, '', b.g)).join('')
  }
  const {reads: enter, writes: leave} = io(b.item, b.g)
  const values = names => names.filter(name => b.env.has(name)).slice(0, 12).map(name => aboutValue(name, '', b.g)).join('')
  return heading(b.kind === 'repeat' ? `${b.title} × ${b.item.items.length}` : b.title) + soft(KINDS[b.kind])
    + tiles([[b.leaves.length, 'nodes'], [known(total(b.all, 'seconds'), seconds), 'time'],
      [known(total(b.all, 'flops')), 'FLOPs'], [known(total(b.all, 'parameters')), 'parameters']])
    + section('Operators', shares(b.leaves)) + section('Reads', values(enter)) + section('Computes', values(leave))
}
function aboutModel() {
  const all = nodes.map((_, i) => i), folded = all.filter(i => nodes[i].folded).length
  const sizes = Object.entries(data.sizes ?? {}).map(([name, type]) => `${name}: ${type}`)
  return heading(data.title)
    + tiles([[grouped(all.length), 'nodes'], [known(data.parameters), 'parameters'], [`${number(data.bytes)}B`, 'of them'], [known(data.flops), 'FLOPs']])
    + (sizes.length ? soft(escaped(`FLOPs and bytes for ${sizes.join(', ')}`)) : '')
    + (folded ? soft(`${grouped(folded)} nodes of constants and shapes are folded into the nodes that read them.`) : '')
    + [data.time, data.verified].filter(Boolean).map(text => soft(escaped(text))).join('')
    + data.notes.map(text => alert(escaped(text), 'warning')).join('') + data.findings.map(rule).join('')
    + section('Inputs', list(data.inputs)) + section('Outputs', list(data.outputs)) + section('Operator sets', list(Object.entries(data.opsets)))
    + section('Mesh', data.mesh && list(Object.entries(data.mesh))) + section('Operators', shares(all))
    + section('Metadata', Object.keys(data.metadata).length && list(Object.entries(data.metadata)))
}
const KEYS = {
  '/': 'search', f: 'fit the graph', '+ −': 'zoom', arrows: 'move; from a node to its neighbours', Enter: 'open or close the block',
  'e c': 'open, close everything', i: 'about the model', t: 'light or dark', Esc: 'close the panel',
}
const aboutKeys = () => heading('Keys') + Object.entries(KEYS).map(([k, what]) => tag('p', {}, tag('kbd', {}, k), ` ${what}`)).join('')
  + soft('A click opens a scope, on its heading closes it, and inside shows what it holds. Drag to move, turn the wheel or pinch to zoom.')
