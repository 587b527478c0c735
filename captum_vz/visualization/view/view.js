// The interactive view. Tokens are set as textContent only, so that no token is read as HTML.

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const data = JSON.parse($('data').textContent);
const { methods, levels, offset } = data;
const width = data.columns.tokens.length;
// Whether shares are written below the tokens, and whether numbers have few levels.
const numbered = width <= 128;
const rough = levels < 1000;
const wantedTheme = root.dataset.theme;
const darkSystem = matchMedia('(prefers-color-scheme: dark)');
// `map`, `tab`, `beside` (a second method), `raw`, `byRow`, `out` (the kinds that are left out), `pinned`, `hover`,
// `focus` (items), `quiz`.
const state = { out: new Set(data.out), tab: 'look' };
let numbers, rowUnits, columnUnit, columnCount, items, sources, shown, ramps, means, drawn, tints;

// ---------------------------------------------------------------- numbers

async function unpack() {
  const bytes = Uint8Array.from(atob(data.numbers), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const wide = levels > 255;
  const count = planes.length / (wide ? 2 : 1);
  numbers = data.signed ? new Int16Array(count) : new Uint16Array(count);
  for (let i = 0; i < count; i += 1) {
    const low = planes[i];
    numbers[i] = wide ? low | (planes[count + i] << 8) : data.signed ? (low << 24) >> 24 : low;
  }
  let start = 0;
  for (const method of methods) {
    for (const map of method.maps) {
      Object.assign(map, { method, start });
      start += data.rows.tokens.length * width;
    }
    method.scale = Math.max(...method.maps.map((map) => map.scale)) || 1;
    method.total = Math.max(...method.maps.flatMap((map) => map.totals || [])) || 1;
  }
}

function score(map, row, column) {
  const q = numbers[map.start + row * width + column] / levels;
  return map.scale * q * Math.abs(q);
}

// The row of a token, or of a word: columns of its pieces are added, rows are averaged.
function rowOf(map, unit, raw = state.raw) {
  const found = new Float64Array(columnCount);
  for (const row of rowUnits[unit]) {
    const weight = (raw && map.totals ? map.totals[row] : 1) / rowUnits[unit].length;
    for (let j = 0; j < width; j += 1) found[columnUnit[j]] += weight * score(map, row, j);
  }
  return found;
}

function columnOf(map, unit) {
  const pieces = [...columnUnit.keys()].filter((j) => columnUnit[j] === unit);
  return rowUnits.map((rows) => rows.reduce((sum, i) => pieces.reduce((all, j) => all + score(map, i, j), sum), 0) / rows.length);
}

// How much there was to divide in a row, if that is known.
const totalOf = ({ totals }, unit) => totals && rowUnits[unit].reduce((sum, i) => sum + totals[i], 0) / rowUnits[unit].length;

// The mean absolute score of a row. A token depends on the sources that have more.
function meanOf(map, unit) {
  if (!map.method.signed) return 1 / columnCount;
  means[map.start] ??= rowUnits.map((_, i) => rowOf(map, i).reduce((sum, one) => sum + Math.abs(one), 0) / columnCount);
  return means[map.start][unit];
}

function written(value, map, short, raw = state.raw && map.totals) {
  if (map.method.signed || raw) return (map.method.signed && value > 0 ? '+' : '') + (value && value.toPrecision(short || rough ? 2 : 3));
  const text = value.toFixed(levels < 100 && value >= 0.1 ? 1 : short || rough ? 2 : 3);
  return short ? text.replace(/^0/, '') : text;
}

// ---------------------------------------------------------------- tokens and words

// An item is a token or word of the text. It has a row, a column, or both.
function setUnits() {
  const words = $('unit').value === 'words';
  const names = (side) => (words ? side.words : side.tokens);
  const units = (side) => side.groups.map((group, i) => (words ? group : i));
  rowUnits = names(data.rows).map(() => []);
  units(data.rows).forEach((unit, i) => rowUnits[unit].push(i));
  columnUnit = units(data.columns);
  columnCount = names(data.columns).length;
  means = {};
  const kinds = words ? data.columns.word_kinds : data.columns.kinds;
  sources = names(data.columns).map((label, column) => ({ label, column, kind: kinds[column], block: 0 }));
  items = [...sources];
  names(data.rows).forEach((label, row) => {
    const own = offset === null ? null : sources[columnUnit[rowUnits[row][0] + offset]];
    if (own && own.row === undefined) own.row = row;
    else items.push({ label, row, kind: 0, block: 1 });
  });
  // Generated tokens follow their prompt.
  if (data.continues && offset && offset + data.rows.tokens.length === width) for (const one of sources.slice(columnUnit[offset])) one.block = 1;
}

const isOut = (item) => state.out.has(item.kind);
const size = Math.abs;
const current = () => (state.quiz ? state.quiz.open && state.quiz.asked : state.pinned || state.hover || state.focus);

// The map of another method for the one that is shown: of the same label, else at the same depth.
function mapIn({ maps }) {
  const from = state.map.method.maps;
  const depth = from.length > 1 ? from.indexOf(state.map) / (from.length - 1) : 1;
  return maps.find((map) => map.label === state.map.label) || maps[Math.round(depth * (maps.length - 1))];
}

// Maps of heads have labels such as "layer 3, head 2".
const layerOf = ({ label }) => label.replace(/, head .*/, '');
const headOf = ({ label }) => label.slice(layerOf({ label }).length + 2);

// The maps of a strip: each layer, of the same head if it has heads; or the heads of the layer.
function mapsOf({ method, map }, ofHeads) {
  const same = method.maps.filter((one) => layerOf(one) === layerOf(map));
  if (ofHeads) return same;
  const found = new Map();
  for (const one of method.maps) if (!found.has(layerOf(one)) || headOf(one) === headOf(map)) found.set(layerOf(one), one);
  return [...found.values()];
}

const joined = (...names) => names.filter(Boolean).join(', ');
const nameOf = (map) => joined(map.method.name, map.label);

// ---------------------------------------------------------------- colors

// 65 backgrounds from the page's to the strongest, each with the text color of higher contrast.
function ramp(from, to) {
  return Array.from({ length: 65 }, (_, i) => {
    const color = from.map((one, k) => Math.round(one + ((to[k] - one) * i) / 64));
    const [r, g, b] = color.map((one) => (one > 10 ? ((one / 255 + 0.055) / 1.055) ** 2.4 : one / 3295));
    return [`rgb(${color})`, (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) ** 2 < 0.0525 ? '#fff' : '#000', [...color, 255]];
  });
}

function setTheme() {
  root.dataset.theme = wantedTheme === 'auto' ? themeAround() || (darkSystem.matches ? 'dark' : 'light') : wantedTheme;
  const [back, blue, orange] = root.dataset.theme === 'dark'
    ? [[22, 24, 29], [127, 196, 255], [255, 170, 110]]
    : [[255, 255, 255], [8, 69, 148], [150, 50, 0]];
  ramps = [ramp(back, blue), ramp(back, orange)];
  tints = {};
}

// The theme of the notebook (Jupyter, VS Code, Colab), site or app around the frame.
function themeAround() {
  try {
    if (parent === window) return;
    const { body, documentElement: html } = parent.document;
    const { jpThemeLight: jupyter } = body.dataset;
    const classes = [...body.classList].join(' ');
    if (jupyter === 'false' || /\b(dark|vscode-high-contrast)\b(?!-light)/.test(classes)) return 'dark';
    if (jupyter === 'true' || /\bvscode-light\b/.test(classes)) return 'light';
    return [body.dataset.theme, html.dataset.theme, html.getAttribute('theme')].find((one) => one === 'dark' || one === 'light');
  } catch {
    // The page around the frame is of another origin.
  }
}

// How strong each source is, from 0 to 1. Raw values are paler where there was little to divide.
function strengths(row, map, unit) {
  const sizes = row.map((one, c) => (isOut(sources[c]) ? 0 : size(one)));
  const total = (state.raw && totalOf(map, unit)) || 1;
  const pale = state.raw && map.totals ? Math.sqrt(total / map.method.total) : 1;
  const most = state.byRow ? Math.max(...sizes) || 1 : map.method.signed ? map.method.scale : total;
  return sizes.map((one) => pale * Math.min(1, state.byRow ? one / most : Math.sqrt(one / most)));
}

// A color of the style sheet. It is read once for a theme, because reading it at each hover is slow.
const tint = (name) => (tints[name] ??= getComputedStyle(root).getPropertyValue(name));
const colorOf = (strength, value) => ramps[value < 0 ? 1 : 0][Math.round(64 * strength)];

// ---------------------------------------------------------------- building

function element(tag, text = '', properties = {}) {
  const made = document.createElement(tag);
  made.append(...[text].flat());
  return Object.assign(made, properties);
}

function isRightToLeft(group) {
  const some = group.filter(({ label }) => /[\u0590-\u08ff]/.test(label));
  return some.length > group.length / 3;
}

// The row and the column of a patch of an image; nothing for other tokens.
function placeOf({ label }) {
  return /^patch (\d+),(\d+)$/.exec(label)?.slice(1).map(Number);
}

function build() {
  const { method } = state.map;
  // Layers and map stand side by side in a narrow frame if their columns are few.
  root.style.setProperty('--least', `${Math.max(17, Math.min(24, 6 + columnCount))}rem`);
  const blocks = !items.some((item) => item.block) ? ['Tokens'] : offset === null ? ['Source tokens', 'Output tokens'] : ['Prompt', 'Generated tokens'];
  const leftwards = isRightToLeft(sources);
  const both = state.tab === 'two' && state.beside;
  shown = [method, both].filter(Boolean).map((one) => {
    const view = {
      method: one, leftwards, heading: element('h2'), buttons: new Map(), strips: [],
      answer: element('p', '', { className: 'answer' }), tip: element('p', '', { className: 'tip' }),
    };
    const flows = blocks.flatMap((name, block) => {
      const own = items.filter((item) => item.block === block);
      const flow = element('div', own.map((item) => {
        const button = element('button', item.label, { dir: 'auto', tabIndex: -1, item, view });
        view.buttons.set(item, button);
        const place = placeOf(item);
        if (place) Object.assign(button, { title: item.label }).style.gridArea = `${place[0] + 2} / ${place[1] + 1}`;
        return button;
      }), {
        className: ['flow', own.some(placeOf) ? 'patches' : numbered ? 'numbers' : '', width > 48 ? 'long' : ''].join(' '), dir: isRightToLeft(own) ? 'rtl' : 'ltr',
        role: 'toolbar', ariaLabel: joined(name, one.name),
      });
      (view.buttons.get(own.find((item) => item === state.pinned)) || flow.firstChild).tabIndex = 0;
      return blocks[1] ? [element('h2', name), flow] : [flow];
    });
    view.heading.hidden = !both;
    view.box = element('div', [view.heading, view.answer, ...flows]);
    const heads = one.maps.some((map) => headOf(map));
    if (new Set(one.maps.map(layerOf)).size > 1) view.strips.push(makeStrip(view, false, 'In which layer?'));
    if (heads) view.strips.push(makeStrip(view, true, 'In which head?'));
    view.depth = element('div', [...view.strips.map(({ box }) => box), view.tip]);
    return view;
  });
  const whole = !both && rowUnits.length > 1 && makeWhole(shown[0]);
  $('texts').replaceChildren(...shown.map(({ box }) => box));
  $('depths').replaceChildren(...shown.filter(({ strips }) => strips.length).map(({ depth }) => depth), ...(whole ? [whole.box] : []));
  paint();
}

function makeStrip(view, ofHeads, title) {
  const strip = { ofHeads, names: element('div'), canvas: element('canvas', '', { role: 'img' }) };
  const { canvas, names } = strip;
  strip.box = element('div', [
    element('h2', [title, ' ', element('small', view.method.name && shown?.[1] ? view.method.name : 'click a row')]),
    element('div', [names, canvas], { className: 'strip', dir: view.leftwards ? 'rtl' : 'ltr' }),
  ]);
  const mapAt = (event) => strip.maps[Math.floor((event.offsetY - strip.above) / 24)];
  const choose = (map) => map && setMap(state.map.method === view.method ? map : state.map.method.maps.find((one) => one.label === map.label));
  canvas.onpointermove = (event) => {
    const [map, item, source] = [mapAt(event), current(), sources[strip.columnAt(event.offsetX)]];
    const known = map && source && item?.row >= 0;
    view.tip.replaceChildren(...(known ? [`${map.label}, `, element('bdi', source.label), `: ${written(rowOf(map, item.row)[source.column], map)}`] : []));
  };
  canvas.onpointerleave = () => view.tip.replaceChildren();
  canvas.onclick = (event) => choose(mapAt(event));
  names.onclick = (event) => choose(strip.maps[[...names.children].indexOf(event.target.closest('button'))]);
  return strip;
}

// The whole map of the layer.
function makeWhole(view) {
  const whole = { heading: element('span'), canvas: element('canvas', '', { id: 'map', role: 'img' }), tip: element('p', '', { className: 'tip' }) };
  const { canvas, heading, tip } = whole;
  view.whole = whole;
  whole.frame = element('span');
  whole.box = element('div', [element('h2', [heading, ' ', element('small', 'rows draw on columns')]), element('div', [canvas, whole.frame], { className: 'whole' }), tip]);
  const at = (event) => whole.rows[Math.floor((event.offsetY - whole.above) / whole.cell)];
  canvas.onpointermove = (event) => {
    const [item, source] = [at(event), sources[whole.columnAt(event.offsetX)]];
    tip.replaceChildren(...(item && source ? [...[item, ' draws on ', source].map(isolated), `: ${written(rowOf(view.map, item.row)[source.column], view.map)}`] : []));
  };
  canvas.onpointerleave = () => tip.replaceChildren();
  canvas.onclick = (event) => { if (at(event)) pin(at(event)); };
  return whole;
}

// ---------------------------------------------------------------- painting

let planned;
function plan() {
  planned ??= requestAnimationFrame(paint);
}

function paint() {
  planned = null;
  const { tab, quiz } = state;
  const item = current();
  const asking = quiz && !quiz.open;
  const row = item?.row >= 0;
  for (const view of shown) {
    view.map = mapIn(view.method);
    view.heading.textContent = nameOf(view.map);
    view.answer.replaceChildren(...(asking ? [] : answerOf(view.map, item).map(isolated)));
    paintTokens(view, item);
  }
  const open = { ask: quiz, second: tab === 'two', table: tab === 'numbers', settings: tab === 'options', read: !asking, every: tab === 'heads', depths: !asking && !['numbers', 'heads'].includes(tab) && (item || !quiz) };
  for (const [id, one] of Object.entries(open)) $(id).hidden = !one;
  if (open.depths) for (const view of shown) {
    for (const strip of view.strips) paintStrip(view, strip, item);
    if (view.whole) paintWhole(view, item);
  }
  if (open.every) paintEvery(shown[0]);
  $('read').replaceChildren(...(asking ? [] : sentences(item).map((parts) => element('p', parts.map(isolated)))));
  $('svg').parentNode.hidden = asking;
  paintLegend();
  paintTitle(row ? item : null);
  clearTimeout(tabled);
  if (open.table) tabled = setTimeout(paintTable, 120);
}

// The chosen token in the heading, if it occurs there once.
function paintTitle(item) {
  const parts = item ? data.title.split(item.label) : [];
  const alone = parts.length === 2 && !/[\p{L}\p{N}]$/u.test(parts[0]) && !/^[\p{L}\p{N}]/u.test(parts[1]);
  $('title').replaceChildren(...(alone ? [parts[0], element('em', item.label), parts[1]] : [data.title]));
}

function paintLegend() {
  const { method } = state.map;
  const most = state.raw && method.maps.some((map) => map.totals) ? method.total : method.signed ? method.scale : 1;
  const top = state.byRow ? 'largest of the row' : `${+most.toPrecision(3)} ${method.signed ? 'score' : state.raw ? 'raw score' : 'share of the row'} (square-root scale)`;
  const stops = (colorsOf, places) => places.map((i) => colorsOf[i][0]);
  const colors = [...(method.signed ? stops(ramps[1], [64, 32, 0]) : []), ...stops(ramps[0], [0, 32, 64])];
  const bar = $('high').previousSibling;
  bar.style.background = `linear-gradient(90deg, ${colors})`;
  $('low').textContent = method.signed ? `\u2212${state.byRow ? top : +most.toPrecision(3)}` : '0';
  $('high').textContent = `${method.signed ? '+' : ''}${top}`;
  const single = rowUnits.length === 1;
  $('looked').textContent = single ? 'is explained' : 'the one you look at: click another';
  $('drawing').hidden = single;
}

function paintTokens({ map, buttons }, item) {
  const row = item?.row >= 0 && rowOf(map, item.row);
  const strength = row && strengths(row, map, item.row);
  const column = item?.column >= 0 && columnOf(map, item.column);
  for (const [other, button] of buttons) {
    const c = other.column;
    const value = (row && c >= 0 && !isOut(other) && row[c]) || 0;
    [button.style.backgroundColor, button.style.color] = value && strength[c] > 0.008 ? colorOf(strength[c], value) : ['', ''];
    const number = value && strength[c] > 0.07 ? written(value, map, true) : '';
    if (numbered) button.dataset.share = number === '.00' ? '' : number;
    const own = column && other.row >= 0 ? size(column[other.row]) : 0;
    const depends = own > 0 && own > meanOf(map, other.row);
    const thick = 1 + Math.round(3 * Math.sqrt(own / (map.method.signed ? map.method.scale : 1)));
    button.style.borderBottom = depends ? `${Math.min(4, thick)}px solid var(--mark)` : '';
    const classes = {
      depends, out: isOut(other), now: other === (state.quiz ? state.quiz.asked : item), pick: other === state.quiz?.pick,
    };
    button.className = Object.keys(classes).filter((one) => classes[one]).join(' ');
    button.ariaPressed = other === state.pinned;
  }
}

// A sign such as "." has quotation marks beside a number.
const quoted = (label) => (/[\p{L}\p{N}]/u.test(label) ? label : `\u201c${label}\u201d`);
const shortened = (label) => (label.length > 14 ? `${[...label].slice(0, 13).join('')}\u2026` : label);

// A canvas of cells, with the labels of the columns above it where there is room. `left` is the place of a column.
function sheet(canvas, leftwards, wide, cell, start, rows, high) {
  const pen = canvas.getContext('2d');
  const font = '12px system-ui, sans-serif';
  Object.assign(pen, { font, direction: 'ltr' });
  const left = (c) => (leftwards ? wide - start - (c + 1) * cell : start + c * cell);
  const labels = sources.map((one) => shortened(one.label));
  const above = cell > 10 ? Math.min(120, Math.max(...labels.map((one) => pen.measureText(one).width)) + 8) : 0;
  const tall = above + high * rows + 2;
  const ratio = devicePixelRatio;
  Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
  canvas.style.height = `${tall}px`;
  pen.scale(ratio, ratio);
  Object.assign(pen, { font, direction: 'ltr', textAlign: 'left', fillStyle: tint('--dim') });
  if (above) {
    pen.rotate(-Math.PI / 2);
    labels.forEach((one, c) => pen.fillText(one, 5 - above, left(c) + cell / 2 + 4, above - 6));
    pen.rotate(Math.PI / 2);
  }
  return { pen, left, above, columnAt: (x) => Math.floor(((leftwards ? wide - x : x) - start) / cell) };
}

// Rows of a strip are maps, columns are sources in the direction of the text.
function paintStrip(view, strip, item) {
  const { canvas, names, ofHeads } = strip;
  const maps = mapsOf(view, ofHeads);
  const rows = item?.row >= 0 ? maps.map((map) => rowOf(map, item.row)) : [];
  // Layout is read once, because reading it at each hover is slow.
  strip.room ??= canvas.parentNode.clientWidth;
  const small = strip.room < 34 * columnCount + 70;
  names.className = small ? 'names' : '';
  // The buttons stay in the page: one that is taken out loses the focus, and a click that has begun on it.
  while (names.children.length > maps.length) names.lastChild.remove();
  while (names.children.length < maps.length) names.append(element('button'));
  maps.forEach((map, p) => {
    const [best] = rows[p] ? strongest(rows[p]) : [];
    const value = best ? written(rows[p][best.column], map, true) : '';
    const name = ofHeads ? headOf(map) || 'all heads' : layerOf(map);
    const button = names.children[p];
    button.replaceChildren(name, ...(best && small ? [' ', element('bdi', quoted(shortened(best.label))), ` ${value}`] : []));
    Object.assign(button, { ariaPressed: map === view.map, ariaLabel: best ? `${name} ${quoted(best.label)} ${value}` : name });
  });
  strip.named ??= names.offsetWidth;
  const wide = Math.max(60, strip.room - strip.named);
  const cell = Math.min(36, wide / columnCount);
  const { pen, left, above, columnAt } = sheet(canvas, view.leftwards, wide, cell, 0, maps.length, 24);
  Object.assign(pen, { textAlign: 'center', font: '11px system-ui, sans-serif' });
  if (cell <= 6 && rows.length) {
    const pixels = tiles(rows.map((row, p) => [maps[p], row, item.row]), view.leftwards);
    pen.imageSmoothingEnabled = false;
    rows.forEach((_, p) => pen.drawImage(pixels, 0, p, columnCount, 1, view.leftwards ? left(columnCount - 1) : 0, above + p * 24, cell * columnCount, 23));
  } else rows.forEach((row, p) => {
    const strength = strengths(row, maps[p], item.row);
    row.forEach((value, c) => {
      const [color, ink] = colorOf(strength[c], value);
      pen.fillStyle = color;
      pen.fillRect(left(c), above + p * 24, cell - 1, 23);
      if (cell < 28 || strength[c] < 0.3) return;
      pen.fillStyle = ink;
      pen.fillText(written(value, maps[p], true), left(c) + cell / 2, above + p * 24 + 16);
    });
  });
  Object.assign(pen, { strokeStyle: tint('--mark'), lineWidth: 2 });
  pen.strokeRect(1 + (view.leftwards ? left(columnCount - 1) : 0), above + maps.indexOf(view.map) * 24, cell * columnCount - 2, 24);
  names.style.paddingTop = `${above}px`;
  canvas.ariaLabel = `${ofHeads ? 'Heads' : 'Layers'} of ${item ? item.label : 'no token'}: ${maps.length} maps, ${columnCount} sources. The table has its numbers.`;
  Object.assign(strip, { maps, above, columnAt });
}

// A canvas with one pixel for each score.
function tiles(lines, leftwards) {
  const pixels = new ImageData(columnCount, lines.length);
  lines.forEach(([map, row, unit], i) => {
    const strength = strengths(row, map, unit);
    row.forEach((value, c) => pixels.data.set(colorOf(strength[c], value)[2], 4 * (i * columnCount + (leftwards ? columnCount - 1 - c : c))));
  });
  const made = element('canvas', '', { width: columnCount, height: lines.length });
  made.getContext('2d').putImageData(pixels, 0, 0);
  return made;
}

// The cells are painted once for a map and its settings, because a long text has many.
function paintWhole({ map, whole, leftwards }, item) {
  const { canvas } = whole;
  const rows = items.filter((one) => one.row >= 0).sort((a, b) => a.row - b.row);
  const wide = whole.room ??= canvas.clientWidth || 300;
  const key = [map.start, state.raw, state.byRow, [...state.out], columnCount, root.dataset.theme].join();
  if (drawn?.key !== key) {
    drawn = { key, cells: tiles(rows.map((one) => [map, rowOf(map, one.row), one.row]), leftwards) };
  }
  const named = Math.min(wide - 90, 520) / columnCount > 10;
  const start = named ? 90 : 0;
  const cell = Math.min(24, (Math.min(wide, 610) - start) / columnCount);
  // Only the frame moves while the map stays.
  const all = cell * columnCount;
  if (whole.key !== key + wide) {
    whole.key = key + wide;
    Object.assign(whole, { rows, cell, ...sheet(canvas, leftwards, wide, cell, start, rows.length, cell) });
    const { pen, left, above } = whole;
    const x = left(leftwards ? columnCount - 1 : 0);
    whole.x = x;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(drawn.cells, x, above, all, cell * rows.length);
    if (named) {
      pen.textAlign = leftwards ? 'left' : 'right';
      rows.forEach((one, i) => pen.fillText(shortened(one.label), leftwards ? wide - start + 6 : start - 6, above + (i + 0.5) * cell + 4, start - 8));
      pen.fillStyle = tint('--back');
      for (let c = 1; c < columnCount; c += 1) pen.fillRect(x + c * cell - 1, above, 1, cell * rows.length);
      for (let i = 1; i < rows.length; i += 1) pen.fillRect(x, above + i * cell - 1, all, 1);
    }
  }
  whole.frame.hidden = !(item?.row >= 0);
  Object.assign(whole.frame.style, { left: `${whole.x - 1}px`, top: `${whole.above + rows.indexOf(item) * cell - 1}px`, width: `${all + 1}px`, height: `${Math.max(5, cell + 1)}px` });
  whole.heading.textContent = /^(map|scores|output)$/.test(map.label) ? 'The whole map' : `The whole map, ${map.label}`;
  canvas.ariaLabel = `${whole.heading.textContent}: ${rows.length} rows, ${columnCount} columns. The table has its numbers.`;
}

// All heads of all layers: a line for each layer, a small map for each head.
function paintEvery({ map, method, leftwards }) {
  const key = [map.start, state.raw, state.byRow, [...state.out], columnCount, root.dataset.theme].join();
  if ($('every').dataset.key === key) return;
  $('every').dataset.key = key;
  const rows = items.filter((one) => one.row >= 0).sort((a, b) => a.row - b.row);
  const lines = [...new Set(method.maps.map(layerOf))].map((layer) => method.maps.filter((one) => layerOf(one) === layer));
  $('every').style.setProperty('--heads', Math.max(...lines.map((line) => line.length)));
  $('every').replaceChildren(...lines.map((line) => element('div', [
    element('span', layerOf(line[0])),
    ...line.map((one) => element('button', tiles(rows.map((unit) => [one, rowOf(one, unit.row), unit.row]), leftwards), {
      title: one.label, ariaLabel: `Show ${one.label}`, ariaPressed: one === map, onclick: () => { setMap(one); setTab('look'); $('look').focus(); },
    })),
  ])));
}

// ---------------------------------------------------------------- words about the numbers

// The sources of a row that are shown, strongest first.
const strongest = (row) => sources.filter((one) => row[one.column] && !isOut(one)).sort((a, b) => size(row[b.column]) - size(row[a.column]));

// Sentences are lists of strings and items, whose labels are isolated from the direction of the text.
function answerOf(map, item) {
  if (!item) return [state.quiz ? '' : 'No token is chosen: point at a token, tap it, or press Tab.'];
  if (!(item.row >= 0)) return [item, ' is a source: tokens that draw on it are underlined.'];
  const row = rowOf(map, item.row);
  const shares = !map.method.signed && !(state.raw && map.totals);
  const least = shares ? 0.05 : 0.05 * size(row[strongest(row)[0]?.column]);
  const [best, ...more] = strongest(row);
  const value = (one) => (shares ? `${rough ? '\u2248\u00a0' : ''}${Math.round(100 * row[one.column])}\u00a0%` : written(row[one.column], map));
  const others = more.slice(0, 2).filter((one) => size(row[one.column]) >= least);
  const where = /^(map|scores|output)$/.test(map.label) ? [] : [/^rollout/.test(map.label) ? 'Through all layers (' : 'In ', element('b', map.label), /^rollout/.test(map.label) ? '), ' : ', '];
  return [...where, { ...item, own: true }, ...(best
    ? [map.method.signed ? ' depends most on ' : ' draws on ', best, ` (${value(best)})`, ...others.flatMap((one, i) => [i ? ', ' : ', then ', one, ` (${value(one)})`]), others.length || !shares ? '.' : row[best.column] > 0.5 ? ', and on hardly anything else.' : '.']
    : [' draws on no token that is shown.'])];
}

function sentences(item) {
  if (!item) return [];
  const about = rough ? '\u2248\u00a0' : '';
  return shown.flatMap(({ map }) => {
    const found = [];
    const name = shown.length > 1 ? `${map.method.name}: ` : '';
    const total = item.row >= 0 ? totalOf(map, item.row) : null;
    if (total !== null) found.push([name, item, ` moves by ${total.toPrecision(3)}; the token that moves most, by ${map.method.total.toPrecision(3)}.`]);
    if (item.column >= 0 && rowUnits.length > 1) {
      const column = columnOf(map, item.column);
      const deep = items.filter((one) => one.row >= 0 && size(column[one.row]) > meanOf(map, one.row))
        .sort((a, b) => size(column[b.row]) - size(column[a.row]));
      found.push(deep.length
        ? [name, 'Tokens that draw on ', item, ': ', ...deep.slice(0, 5).flatMap((one, i) => [i ? ', ' : '', one, ` ${about}${written(column[one.row], map, false, false)}`]), deep.length > 5 ? ` and ${deep.length - 5} more.` : '.']
        : [name, 'No token draws more than evenly on ', item, '.']);
    }
    return found;
  });
}

const isolated = (part) => (part.label === undefined ? part : element('bdi', part.label, { className: part.own ? 'own' : '' }));
const spoken = (parts) => parts.map((part) => part.label ?? part.textContent ?? part).join('');

let waiting, tabled;
function say(text) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { $('live').textContent = text; }, 150);
}

// Only what the keyboard, a tap or a setting changes is announced.
function show() {
  paint();
  remember();
  say([...shown.map(({ map }) => answerOf(map, current())), ...sentences(current())].map(spoken).join(' '));
}

// ---------------------------------------------------------------- the table

// The row of the chosen token in all maps. Without a token, the whole map.
function tableOf(item) {
  const from = sources.filter((one) => !isOut(one));
  if (item?.row >= 0) {
    const columns = shown.flatMap((view) => view.method.maps).map((map) => ({ map, row: rowOf(map, item.row) }));
    return {
      caption: `How much ${item.label} draws on each token`,
      rows: [['position', 'source', ...columns.map(({ map }) => (shown.length > 1 ? nameOf(map) : map.label))],
        ...from.map((one) => [one.column, one.label, ...columns.map(({ map, row }) => written(row[one.column], map))])],
    };
  }
  const { map } = shown[0];
  const outputs = items.filter((one) => one.row >= 0).sort((a, b) => a.row - b.row);
  return {
    caption: `${nameOf(map)}: rows are output tokens`,
    rows: [['position', 'token', ...from.map((one) => one.label)], ...outputs.map((one) => {
      const row = rowOf(map, one.row);
      return [one.row, one.label, ...from.map((source) => written(row[source.column], map))];
    })],
  };
}

function paintTable() {
  const item = current();
  if (items.length > 64 && !(item?.row >= 0)) {
    $('cells').textContent = 'Choose an output token for its numbers. Copy table copies the whole map.';
    return;
  }
  const { caption, rows: [heads, ...rows] } = tableOf(item);
  const line = (cells, first) => element('tr', cells.map((text, i) => (first || i === 1
    ? element('th', text, { dir: 'auto', scope: first ? 'col' : 'row' })
    : element('td', text))));
  $('cells').replaceChildren(element('table', [element('caption', caption, { dir: 'auto' }),
    element('thead', line(heads, true)), element('tbody', rows.map((cells) => line(cells)))]));
}

async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // The page may not have the permission.
    const area = document.body.appendChild(element('textarea', text));
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  $('copied').textContent = done;
  say(done);
}

// ---------------------------------------------------------------- links and pictures

// The token and the layer in the address, such as "#token=6&layer=3".
function remember() {
  const { map, pinned } = state;
  const parts = [pinned?.row >= 0 && `token=${rowUnits[pinned.row][0]}`, `layer=${encodeURIComponent(map.label.replace(/^layer /, ''))}`,
    map.method !== methods[0] && `method=${methods.indexOf(map.method)}`];
  try {
    history.replaceState(null, '', `#${parts.filter(Boolean).join('&')}`);
  } catch {
    // A frame without an address of its own.
  }
}

function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const { maps } = methods[wanted.get('method')] || state.map.method;
  const named = maps.find(({ label }) => [label, label.replace(/^layer /, '')].includes(wanted.get('layer')));
  state.map = named || mapIn(maps[0].method);
  const row = wanted.get('token');
  if (row) state.pinned = items.find((item) => rowUnits[item.row]?.includes(Number(row))) || state.pinned;
  $('method').value = methods.indexOf(state.map.method);
}

// What is shown, as the elements of an SVG: no page, and text stays text.
function picture() {
  const make = (tag, attributes, text = '') => {
    const made = document.createElementNS($('space').namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.textContent = text;
    return made;
  };
  const [wide, edge] = [960, 24];
  const pen = element('canvas').getContext('2d');
  const parts = [];
  let y = edge;
  const write = (text, x, at, high, color, more = {}) => parts.push(make('text', { x, y: at, fill: color, 'font-size': high, ...more }, text));
  const wrap = (text, high, color, weight = 400) => {
    pen.font = `${weight} ${high}px sans-serif`;
    let line = '';
    for (const word of [...text.split(' '), null]) {
      if (word === null || (line && pen.measureText(`${line} ${word}`).width > wide - 2 * edge)) {
        y += high * 1.3;
        write(line, edge, y, high, color, { 'font-weight': weight });
        line = '';
      }
      line += (line && ' ') + word;
    }
  };
  const box = (x, at, w, h, fill, more = {}) => parts.push(make('rect', { x, y: at, width: w, height: h, rx: 4, fill, ...more }));
  const item = current();
  wrap(data.title, 22, tint('--text'), 700);
  if (data.subtitle) wrap(data.subtitle, 14, tint('--dim'));
  for (const { map, buttons, leftwards, strips: [strip] } of shown) {
    y += 8;
    if (shown[1]) wrap(map.method.name, 14, tint('--dim'), 700);
    wrap(answerOf(map, item).map(spoken1).join(''), 17, tint('--text'));
    y += 12;
    let x = edge;
    pen.font = '17px sans-serif';
    for (const [one, button] of buttons) {
      const w = Math.max(24, pen.measureText(one.label).width + 16);
      if (x + w > wide - edge) [x, y] = [edge, y + 48];
      const at = leftwards ? wide - x - w : x;
      box(at, y, w, 42, button.style.backgroundColor || tint('--soft'), one === item ? { stroke: tint('--mark'), 'stroke-width': 2 } : {});
      const color = button.style.color || tint('--text');
      write(one.label, at + w / 2, y + 20, 17, color, { 'text-anchor': 'middle' });
      write(button.dataset.share || '', at + w / 2, y + 36, 11, color, { 'text-anchor': 'middle' });
      x += w + 4;
    }
    y += 56;
    if (!strip || !(item?.row >= 0)) continue;
    const cell = Math.min(36, (wide - 2 * edge - 110) / columnCount);
    const column = (c) => (leftwards ? wide - edge - (c + 1) * cell : edge + 110 + c * cell);
    if (cell > 10) {
      y += 90;
      sources.forEach((one, c) => write(shortened(one.label), 0, 0, 12, tint('--dim'), { transform: `translate(${column(c) + cell / 2 + 4} ${y - 6}) rotate(-90)` }));
    }
    for (const layer of mapsOf({ method: map.method, map })) {
      write(layer.label, edge + 100, y + 16, 12, tint(layer === map ? '--mark' : '--dim'), { 'text-anchor': 'end', 'font-weight': layer === map ? 700 : 400 });
      const row = rowOf(layer, item.row);
      const strength = strengths(row, layer, item.row);
      row.forEach((value, c) => {
        const [color, ink] = colorOf(strength[c], value);
        box(column(c), y, cell - (cell > 6), 23, color);
        if (cell >= 28 && strength[c] >= 0.3) write(written(value, layer, true), column(c) + cell / 2, y + 16, 11, ink, { 'text-anchor': 'middle' });
      });
      y += 24;
    }
    y += 8;
  }
  ramps[0].forEach(([color], i) => { if (i % 4 === 0) box(edge + 2 * i, y + 8, 8, 10, color, { rx: 0 }); });
  write(`${$('low').textContent} to ${$('high').textContent}`, edge + 144, y + 17, 12, tint('--dim'));
  y += 18;
  wrap(data.about, 11, tint('--dim'));
  const high = Math.ceil(y + edge);
  const svg = make('svg', { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, 'font-family': 'system-ui, sans-serif' });
  svg.append(make('title', {}, data.title), make('desc', {}, joined(answerOf(shown[0].map, item).map(spoken1).join(''), data.about)), make('rect', { width: wide, height: high, fill: tint('--back') }), ...parts);
  return { text: new XMLSerializer().serializeToString(svg), wide, high };
}

const spoken1 = (part) => spoken([part]);

function download(blob, ending) {
  const address = URL.createObjectURL(blob);
  element('a', '', { href: address, download: `captum_vz.${ending}` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function savePng() {
  const { text, wide, high } = picture();
  const drawing = new Image(wide, high);
  drawing.onload = () => {
    const canvas = element('canvas', '', { width: 2 * wide, height: 2 * high });
    canvas.getContext('2d').drawImage(drawing, 0, 0, 2 * wide, 2 * high);
    canvas.toBlob((blob) => download(blob, 'png'));
  };
  drawing.src = `data:image/svg+xml,${encodeURIComponent(text)}`;
}

// ---------------------------------------------------------------- predict, then reveal

// The sources that may be picked: not the token itself, not what is left out.
const allowed = (item) => sources.filter((one) => one !== item && !isOut(one));

function startQuiz() {
  const possible = items.filter((one) => one.row >= 0 && !isOut(one) && allowed(one).length > 1);
  const given = data.predict.map((row) => possible.find((one) => rowUnits[one.row].includes(row))).filter(Boolean);
  const some = possible.filter((one) => one.kind !== 1 && one.kind !== 3);
  const from = some.length ? some : possible;
  const count = Math.min(5, from.length);
  const spread = Array.from({ length: count }, (_, i) => from[Math.round((i * (from.length - 1)) / Math.max(1, count - 1))]);
  const first = possible.filter((one) => one === state.pinned);
  const targets = given.length ? [...new Set(given)] : [...first, ...spread.filter((one) => one !== state.pinned)].slice(0, count);
  if (!targets.length) { say('There is no token to ask about.'); return; }
  Object.assign(state, { kept: state.pinned, pinned: null, quiz: { targets, at: -1, picks: [], points: [] } });
  $('method').disabled = true;
  build();
  nextQuestion();
}

function ask(parts, next, stop = 'Stop') {
  $('question').replaceChildren(...parts.map(isolated));
  $('next').hidden = !next;
  $('next').textContent = next;
  $('stop').textContent = stop;
  say(spoken(parts));
  paint();
}

function nextQuestion() {
  const { quiz } = state;
  quiz.at += 1;
  if (quiz.at === quiz.targets.length) { endQuiz(); return; }
  Object.assign(quiz, { asked: quiz.targets[quiz.at], open: false, pick: null });
  $('ask').hidden = false;
  $('handin').hidden = true;
  ask([`Question ${quiz.at + 1} of ${quiz.targets.length}: which other token does `, quiz.asked, ` draw on most, in ${nameOf(state.map)}? Choose a token.`], '');
  focusToken(shown[0].buttons.get(quiz.asked));
}

function answer(item) {
  const { quiz } = state;
  if (quiz.open || !allowed(quiz.asked).includes(item)) return;
  const row = rowOf(state.map, quiz.asked.row, false).map(size);
  const ranked = allowed(quiz.asked).sort((a, b) => row[b.column] - row[a.column]);
  const [highest, own] = [row[ranked[0].column], row[item.column]];
  const points = highest ? Math.round((100 * own) / highest) : 0;
  const share = (value) => written(value, state.map, false, false);
  quiz.picks.push(`${quiz.asked.row}>${item.column}`);
  quiz.points.push(points);
  Object.assign(quiz, { open: true, pick: item });
  ask([points === 100 ? 'Right: ' : 'You chose ', item, ` has ${share(own)}, number ${1 + ranked.filter((one) => row[one.column] > own).length} of ${ranked.length}.`,
    ...(points === 100 ? [] : [' The strongest is ', ranked[0], ` with ${share(highest)}.`]), ` ${points} points.`],
  quiz.at + 1 < quiz.targets.length ? 'Next question' : 'Show my score');
  $('next').focus();
}

function endQuiz() {
  const { quiz, map } = state;
  const { points: all } = quiz;
  const right = all.filter((one) => one === 100).length;
  const points = Math.round(all.reduce((sum, one) => sum + one, 0) / all.length);
  $('result').value = `captum-vz-predict 1; page ${data.id}; method ${methods.indexOf(map.method)}; map ${map.method.maps.indexOf(map)}; `
    + `${$('unit').value}; without ${[...state.out].sort().join('') || '-'}; ${quiz.picks.join(',')}; ${right} right; ${points} points`;
  Object.assign(quiz, { asked: null, pick: null });
  $('handin').hidden = false;
  ask([`Score: ${right} of ${all.length} right, ${points} of 100 points.`], '', 'Explore');
  $('result').focus();
}

function stopQuiz() {
  Object.assign(state, { quiz: null, pinned: state.kept });
  $('ask').hidden = true;
  $('method').disabled = false;
}

// ---------------------------------------------------------------- events

function setMap(map) {
  if (!map || state.quiz) return;
  state.map = map;
  show();
}

function setTab(name) {
  if (state.quiz) stopQuiz();
  state.tab = name;
  for (const tab of $('tabs').children) {
    Object.assign(tab, { ariaSelected: tab.id === name, tabIndex: tab.id === name ? 0 : -1 });
    tab.setAttribute('aria-controls', 'panel');
  }
  $('panel').setAttribute('aria-labelledby', name);
  build();
  if (name === 'predict') startQuiz();
}

// The methods that may stand beside: all others.
function setMethod(method) {
  const others = methods.filter((one) => one !== method);
  if (!others.includes(state.beside)) [state.beside] = others;
  $('beside').replaceChildren(...others.map((one) => new Option(one.name, methods.indexOf(one))));
  if (state.beside) $('beside').value = methods.indexOf(state.beside);
  state.map = mapIn(method);
  $('method').value = methods.indexOf(method);
  build();
  show();
}

function focusToken(button) {
  for (const one of button.parentNode.children) one.tabIndex = one === button ? 0 : -1;
  // A frame that opens with a question neither takes the keyboard from the page around it nor scrolls that page.
  if (document.hasFocus()) button.focus();
}

function onKey(event) {
  const button = tokenOf(event);
  if (!button) return;
  const all = [...button.parentNode.children];
  const near = (by) => all[all.indexOf(button) + (button.parentNode.dir === 'rtl' ? -by : by)];
  const { maps } = state.map.method;
  const layer = (by) => setMap(maps[maps.indexOf(state.map) + by]);
  const act = {
    ArrowRight: () => near(1), ArrowLeft: () => near(-1), Home: () => all[0], End: () => all.at(-1),
    ArrowUp: () => layer(1), ArrowDown: () => layer(-1), Escape: () => { state.focus = null; pin(); },
  }[event.key];
  if (!act) return;
  event.preventDefault();
  const goal = act();
  if (goal) focusToken(goal);
}

const tokenOf = (event) => event.target.closest('.flow button');

function pin(item) {
  if (state.quiz) return;
  state.pinned = item;
  show();
}

// The item at the same place after a change of units.
function setUnitsAndPin() {
  const old = state.pinned;
  const piece = old && (old.row === undefined ? columnUnit.indexOf(old.column) : rowUnits[old.row][0]);
  setUnits();
  state.hover = state.focus = null;
  state.pinned = old && (old.row === undefined ? sources[columnUnit[piece]] : items.find((one) => rowUnits[one.row]?.includes(piece)));
  build();
  show();
}

function listen() {
  const texts = $('texts');
  texts.onpointerover = (event) => {
    const item = tokenOf(event)?.item;
    if (event.pointerType === 'touch' || item === state.hover) return;
    state.hover = item;
    plan();
  };
  texts.onpointerleave = () => { state.hover = null; plan(); };
  texts.addEventListener('focusin', (event) => {
    const button = tokenOf(event);
    if (!button) return;
    state.focus = button.item;
    if (state.quiz || !button.matches(':focus-visible')) plan();
    else show();
  });
  texts.onclick = (event) => {
    const button = tokenOf(event);
    if (!button) return;
    focusToken(button);
    if (state.quiz) answer(button.item);
    else pin(state.pinned !== button.item && button.item);
  };
  texts.onkeydown = onKey;
  $('tabs').onclick = ({ target }) => { if (target.id !== 'tabs') setTab(target.id); };
  $('tabs').onkeydown = ({ key, target }) => {
    const all = [...$('tabs').children].filter((one) => !one.hidden);
    const goal = { ArrowRight: 1, ArrowLeft: -1 }[key];
    const next = goal && all[(all.indexOf(target) + goal + all.length) % all.length];
    if (next) { setTab(next.id); next.focus(); }
  };
  $('method').onchange = () => setMethod(methods[$('method').value]);
  $('beside').onchange = () => { state.beside = methods[$('beside').value]; build(); show(); };
  $('unit').onchange = setUnitsAndPin;
  $('values').onchange = () => { state.raw = $('values').value === 'raw'; show(); };
  $('scale').onchange = () => { state.byRow = $('scale').value === 'row'; show(); };
  $('filter').onchange = ({ target }) => { state.out[target.checked ? 'add' : 'delete'](Number(target.value)); show(); };
  $('copy').onclick = () => {
    const { rows } = tableOf(current());
    copy(rows.map((cells) => cells.join('\t')).join('\n'), `Copied ${rows.length - 1} rows.`);
  };
  $('next').onclick = nextQuestion;
  $('stop').onclick = () => { setTab('look'); $('look').focus(); };
  $('copyresult').onclick = () => copy($('result').value, 'Copied the result.');
  $('link').onclick = () => { remember(); copy(location.href, 'Copied the link.'); };
  $('svg').onclick = () => download(new Blob([picture().text], { type: 'image/svg+xml' }), 'svg');
  $('png').onclick = savePng;
  window.onhashchange = () => { recall(); build(); };
  darkSystem.onchange = retheme;
  new ResizeObserver(() => {
    for (const one of shown.flatMap(({ strips, whole }) => [...strips, whole || {}])) one.room = one.named = undefined;
    plan();
  }).observe(texts);
}

function retheme() {
  setTheme();
  paint();
}

// In a frame, follow the theme of the page around it, and be as high as the content.
function fitFrame() {
  try {
    const frame = window.frameElement;
    if (!frame) return;
    const fit = () => {
      const high = document.body.offsetHeight;
      if (high) frame.style.height = `${high}px`;
    };
    // An observer sees nothing of a frame before it is scrolled into sight. In a hidden tab there is no height.
    fit();
    new ResizeObserver(fit).observe(document.body);
    const watch = new MutationObserver(retheme);
    for (const one of [parent.document.body, parent.document.documentElement]) watch.observe(one, { attributes: true });
  } catch {
    // as in themeAround
  }
}

// Settings that this page has no use for are hidden.
function fillSettings() {
  const hide = (one, hidden) => { one.parentNode.hidden = hidden; };
  $('method').append(...methods.map((method, i) => new Option(method.name || 'scores', i)));
  hide($('method'), methods.length < 2);
  $('two').hidden = methods.length < 2;
  $('heads').hidden = !methods.some((method) => method.maps.some(headOf));
  hide($('unit'), ![data.rows, data.columns].some((side) => side.words.length < side.tokens.length));
  hide($('values'), !methods.some((method) => method.maps.some((map) => map.totals)));
  const kinds = [...data.columns.kinds, ...data.columns.word_kinds].map(String);
  for (const box of $('filter').querySelectorAll('input')) {
    hide(box, !kinds.includes(box.value));
    box.checked = state.out.has(Number(box.value));
  }
  $('filter').hidden = kinds.every((kind) => kind === '0');
  $('sums').hidden = methods.some(({ signed }) => signed);
  $('link').hidden = location.protocol === 'about:';
}

await unpack();
setTheme();
fillSettings();
setUnits();
// Shares of hundreds of patches are small: the largest has the darkest colour.
if (sources.some(placeOf)) {
  state.byRow = true;
  $('scale').value = 'row';
}
const { maps } = methods[0];
state.map = maps[Math.min(data.layer, maps.length - 1)];
state.pinned = items.find((item) => item.row === data.token);
recall();
setMethod(state.map.method);
setTab(data.predict.length ? 'predict' : 'look');
listen();
fitFrame();
document.body.dataset.ready = '';
