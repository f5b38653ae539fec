// The panel: facts of a node, a block, an input or output, or of the model.

/** Selects a node ({node, at: the drawn node}), a block ({block}), or a port ({port}); null closes the panel. */
function choose(what) {
  chosen = what
  panel.hidden = !what
  if (what) {
    panel.innerHTML = `<button class="close" title="close (Esc)" aria-label="close">×</button>` + (what.model ? aboutModel() : what.keys ? aboutKeys()
      : what.node !== undefined ? aboutNode(what.node) : aboutBlock(blocks.get(what.block ?? what.port)))
    panel.scrollTop = 0
    panel.querySelectorAll('canvas[data-picture]').forEach(paint)
  }
  mark()
}
function mark() {
  view.querySelectorAll('.chosen').forEach(e => e.classList.remove('chosen'))
  view.querySelectorAll('.lit').forEach(e => e.classList.remove('lit'))
  if (!chosen) return
  const id = chosen.block ?? chosen.port, node = chosen.at ?? chosen.node
  const own = id !== undefined ? view.querySelector(`[data-id="${CSS.escape(id)}"]`) : view.querySelector(`[data-node="${node}"]`)
  own?.classList.add('chosen')
  const b = blocks.get(id ?? own?.closest('[data-id]')?.dataset.id), g = b?.parent
  if (!g || !g.edges) return
  const k = g.children.indexOf(b), group = g === root ? view : view.querySelector(`[data-id="${CSS.escape(g.id)}"]`)
  const paths = [...group.children].filter(e => e.classList.contains('edge'))
  g.edges.forEach((edge, e) => (edge.from === k || edge.to === k) && paths[e]?.classList.add('lit'))
}
const tile = (value, name) => value === undefined || value === '' ? '' : `<div>${escaped(value)}<span>${name}</span></div>`
const list = rows => `<dl>${rows.map(([a, b]) => `<dt>${escaped(a)}</dt><dd>${escaped(b)}</dd>`).join('')}</dl>`
const alert = x => `<div class="alert ${x.severity}"><b>${escaped(x.rule)}</b> ${escaped(x.message)}<br><span class="soft">${escaped(x.fix)}</span></div>`

function figuresOf(v) {
  if (!v?.figures) return ''
  const {min, max, mean, zeros, nan, inf, size, sample} = v.figures
  const bars = v.histogram?.length ? `<svg class="bars" viewBox="0 0 ${v.histogram.length} 100" preserveAspectRatio="none">${v.histogram.map((h, k) => `<rect x="${k + 0.08}" y="${100 - h}" width="0.84" height="${h}"/>`).join('')}</svg>` : ''
  const image = v.picture ? `<canvas data-picture='${escaped(JSON.stringify(v.picture))}'></canvas>` : ''
  const words = [mean !== undefined && `mean ${mean}`, zeros && `${+(100 * zeros).toPrecision(3)} % zeros`, nan && `<b style="color:var(--bad)">${nan.toLocaleString('en')} NaN</b>`, inf && `<b style="color:var(--bad)">${inf.toLocaleString('en')} infinite</b>`, sample && `of ${sample.toLocaleString('en')} elements`]
  return `${image}${bars}${min === undefined ? '' : `<div class="scale"><span>${min}</span><span>${words.filter(Boolean).join(' · ')}</span><span>${max}</span></div>`}${min === undefined && nan ? words.filter(Boolean).join(' · ') : ''}`
}
function paint(canvas) {
  const {width, height, signed, data} = JSON.parse(canvas.dataset.picture), bytes = Uint8Array.from(atob(data), c => c.charCodeAt(0))
  canvas.width = width, canvas.height = height
  const wide = Math.min(324, Math.max(120, width * 8))
  canvas.style.width = `${wide}px`, canvas.style.height = `${Math.max(14, Math.min(220, wide * height / width))}px`
  const ink = canvas.getContext('2d'), image = ink.createImageData(width, height)
  bytes.forEach((v, k) => {
    const t = v / 254, s = signed ? (t - 0.5) * 2 : t
    const [r, g, b] = v === 255 ? [255, 0, 200] : signed ? (s < 0 ? [255 + s * 214, 255 + s * 155, 255 + s * 37] : [255 - s * 46, 255 - s * 194, 255 - s * 208])
      : [68 + s * (s < 0.5 ? -70 : 185) + (s < 0.5 ? 0 : -128), 1 + s * 230, 84 + (s < 0.5 ? s * 112 : (1 - s) * 206 - 46)]
    image.data.set([Math.max(0, r), Math.max(0, g), Math.max(0, b), 255], 4 * k)
  })
  ink.putImageData(image, 0, 0)
}
function valueRow(name, role, g, links = '') {
  const v = typeOf(name, g), local = facts[g].producers.get(name)
  const chain = local !== undefined && nodes[local].folded ? folded(local) : ''
  const about = [v.type, v.shape && !`${v.type}`.includes(v.shape.join(', ')) && `here [${v.shape.join(', ')}]`, v.bytes > 64 && `${number(v.bytes)}B`, v.sharding].filter(Boolean).join(' · ')
  return `<div class="value"><div class="head"><a class="mono" data-value="${escaped(name)}" data-graph="${g}">${escaped(name)}</a><span class="role">${escaped(role)}</span></div>`
    + `<div class="mono soft">${escaped(about)}</div>${v.value !== undefined ? `<div class="mono">= ${escaped(v.value)}</div>` : ''}`
    + `${v.differs ? `<div class="alert error">differs: ${escaped(v.differs)}</div>` : ''}${chain}${figuresOf(v)}${links}</div>`
}
/** The folded nodes behind a value. */
function folded(i) {
  const seen = new Set, visit = k => { if (!seen.has(k) && seen.size < 40) { seen.add(k); for (const n of reads(k)) { const p = facts[nodes[k].graph].producers.get(n); if (p !== undefined && nodes[p].folded) visit(p) } } }
  visit(i)
  return `<div class="soft">folded: ${[...seen].reverse().map(k => `<a data-goto="${k}">${escaped(opOf(k))}</a>`).join(' → ')}</div>`
}
function aboutNode(i) {
  const node = nodes[i], op = operators[node.type], names = op.inputs ?? []
  const [, , opset] = node.type.split(':')
  const role = k => k < names.length ? names[k] : op.variadic ?? ''
  const readersOf = n => (facts[node.graph].readers.get(n) ?? []).map(r => `<a data-goto="${r}">${escaped(opOf(r))}</a>`)
  const inputs = node.inputs.map((n, k) => n ? valueRow(n, role(k), node.graph) : '').join('')
  const captures = [...new Set(node.captures ?? [])].map(n => valueRow(n, 'captured', node.graph)).join('')
  const outputs = node.outputs.map(n => {
    const to = readersOf(n), more = to.length > 8 ? ` and ${to.length - 8} more` : ''
    return n ? valueRow(n, '', node.graph, to.length ? `<div class="soft">read by ${to.slice(0, 8).join(', ')}${more}</div>` : '') : ''
  }).join('')
  return `<h2>${dot(op.kind)}${escaped(op.name)}</h2><p class="soft">${escaped(op.domain || 'ai.onnx')} ${opset}${op.since && op.since !== +opset ? `, since ${op.since}` : ''}${node.folded ? ' · folded into its reader' : ''}</p>`
    + (op.document ? `<p>${escaped(op.document)}</p>` : '') + `<p><code>${escaped(node.name)}</code></p>`
    + (node.differs ? `<div class="alert error"><b>First node that differs</b> from ${escaped(data.against)}: ${escaped(node.differs)}</div>` : '')
    + (node.findings ?? []).map(alert).join('')
    + `<div class="tiles">${tile(node.seconds && seconds(node.seconds), `time, ${number(100 * (node.share ?? 0))} %`)}${tile(node.flops === null ? 'host' : node.flops && number(node.flops), 'FLOPs')}${tile(node.bytes && number(node.bytes), 'bytes moved')}${tile(node.parameters ? number(node.parameters) : '', 'parameters')}</div>`
    + (node.fused ? `<p class="soft">XLA fuses with it: <span class="mono">${escaped(node.fused.slice(0, 8).join(', '))}${node.fused.length > 8 ? ` and ${node.fused.length - 8} more` : ''}</span></p>` : '')
    + (node.host ? '<p class="soft">Runs on the host.</p>' : '')
    + (node.attributes ? `<h3>Attributes</h3>${list(Object.entries(node.attributes))}` : '')
    + (inputs ? `<h3>Inputs</h3>${inputs}` : '') + (captures ? `<h3>Captures</h3>${captures}` : '') + (outputs ? `<h3>Outputs</h3>${outputs}` : '')
    + (op.signature ? `<h3>Signature</h3><code>${escaped(op.signature)}</code>` : '') + (op.limits ? `<p class="soft">${escaped(op.limits)}</p>` : '')
}
function shares(list) {
  const counts = new Map
  for (const i of list) counts.set(opOf(i), [(counts.get(opOf(i))?.[0] ?? 0) + 1, kindOf(i)])
  const rows = [...counts].sort((a, b) => b[1][0] - a[1][0]), most = rows[0]?.[1][0] ?? 1
  return `<div class="share">${rows.slice(0, 14).map(([name, [n, kind]]) => `<span>${escaped(name)}</span><span class="soft">${n}</span><i style="width:${100 * n / most}%;background:var(--${kind})"></i>`).join('')}</div>${rows.length > 14 ? `<p class="soft">${rows.length - 14} more operators</p>` : ''}`
}
const sums = list => `<div class="tiles">${tile(list.length, 'nodes')}${tile(data.time && seconds(total(list, 'seconds')), 'time')}${tile(data.flops !== undefined ? number(total(list, 'flops')) : '', 'FLOPs')}${tile(total(list, 'parameters') ? number(total(list, 'parameters')) : '', 'parameters')}</div>`
function aboutBlock(b) {
  if (b.kind === 'input' || b.kind === 'output')
    return `<h2>${dot('port')}${escaped(b.title)}</h2><p class="soft">${b.kind}${b.item.values.length > 1 ? `s, ${b.item.values.length}` : ''}</p>` + b.item.values.slice(0, 100).map(n => valueRow(n, '', b.g)).join('')
  const what = {scope: 'scope', part: 'consecutive nodes', repeat: 'repeated layers, drawn once', graph: 'graph', layer: 'layer', node: 'node with graphs'}[b.kind]
  const {reads: from, writes} = io(b.item, b.g)
  const values = names => names.filter(n => b.env.has(n)).slice(0, 12).map(n => valueRow(n, '', b.g)).join('')
  const enter = values(from), leave = values(writes)
  return `<h2>${escaped(b.title)}${b.kind === 'repeat' ? ` × ${b.item.items.length}` : ''}</h2><p class="soft">${what}</p>${sums(b.leaves)}<h3>Operators</h3>${shares(b.leaves)}`
    + (enter ? `<h3>Reads</h3>${enter}` : '') + (leave ? `<h3>Computes</h3>${leave}` : '')
}
function aboutModel() {
  const all = nodes.map((_, i) => i), hidden = all.filter(i => nodes[i].folded).length
  const sizes = Object.entries(data.sizes ?? {})
  return `<h2>${escaped(data.title)}</h2><div class="tiles">${tile(all.length, 'nodes')}${tile(number(data.parameters), 'parameters')}${tile(`${number(data.bytes)}B`, 'of them')}${tile(data.flops !== undefined ? number(data.flops) : '', 'FLOPs')}</div>`
    + (sizes.length ? `<p class="soft">FLOPs and bytes for ${escaped(sizes.map(([n, t]) => `${n}: ${t}`).join(', '))}</p>` : '')
    + (hidden ? `<p class="soft">${hidden} nodes of constants and shapes are folded into the nodes that read them.</p>` : '')
    + (data.time ? `<p class="soft">${escaped(data.time)}</p>` : '') + (data.verified ? `<p class="soft">${escaped(data.verified)}</p>` : '')
    + data.notes.map(n => `<div class="alert">${escaped(n)}</div>`).join('') + data.findings.map(alert).join('')
    + `<h3>Inputs</h3>${list(data.inputs)}<h3>Outputs</h3>${list(data.outputs)}<h3>Operator sets</h3>${list(Object.entries(data.opsets))}`
    + (data.mesh ? `<h3>Mesh</h3>${list(Object.entries(data.mesh))}` : '') + `<h3>Operators</h3>${shares(all)}`
    + (Object.keys(data.metadata).length ? `<h3>Metadata</h3>${list(Object.entries(data.metadata))}` : '')
}
const KEYS = [['/', 'search'], ['f', 'fit the graph'], ['+ −', 'zoom'], ['arrows', 'move; from a node to its neighbours'], ['Enter', 'open or close the block'], ['e c', 'open, close everything'], ['i', 'about the model'], ['t', 'light or dark'], ['Esc', 'close the panel']]
const aboutKeys = () => `<h2>Keys</h2>${KEYS.map(([k, what]) => `<p><kbd>${k}</kbd> ${what}</p>`).join('')}<p class="soft">A click opens a scope, on its heading closes it, and inside shows what it holds. Drag to move, turn the wheel or pinch to zoom.</p>`
