// The interactive view. Tokens are set as textContent only, so that no token is read as HTML.

const $ = (id) => document.getElementById(id);
const root = document.documentElement;
const data = JSON.parse($('data').textContent);
const { methods, levels, offset } = data;
const WIDTH = data.columns.tokens.length;
const MOST_NUMBERED = 128; // tokens with their share written below them
const MOST_LABELED = 70; // tokens with their label above the depth strip
const MOST_WHOLE = 64; // tokens of a table of the whole map
const WANTED_THEME = root.dataset.theme;
const state = {
  method: 0, beside: -1, panel: 0, unit: 'pieces', raw: false, scale: 'same', out: new Set(),
  pinned: null, hover: null, focus: null, quiz: null,
};
let numbers, starts, rowUnits, columnUnit, columnCount, items, shown, ramps, means;

// ---------------------------------------------------------------- numbers

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const wide = levels > 255;
  const count = wide ? planes.length / 2 : planes.length;
  const found = data.signed ? new Int16Array(count) : new Uint16Array(count);
  for (let i = 0; i < count; i += 1) {
    const low = planes[i];
    found[i] = wide ? low | (planes[count + i] << 8) : data.signed ? (low << 24) >> 24 : low;
  }
  return found;
}

function score(method, panel, row, column) {
  const q = numbers[starts[method][panel] + row * WIDTH + column] / levels;
  return methods[method].maps[panel].scale * q * Math.abs(q);
}

// The row of a token, or of a word: columns of its pieces are added, rows are averaged.
function rowOf(method, panel, unit, raw = state.raw) {
  const found = new Float64Array(columnCount);
  const { totals } = methods[method].maps[panel];
  for (const row of rowUnits[unit]) {
    const weight = (raw && totals ? totals[row] : 1) / rowUnits[unit].length;
    for (let j = 0; j < WIDTH; j += 1) found[columnUnit[j]] += weight * score(method, panel, row, j);
  }
  return found;
}

function columnOf(method, panel, unit) {
  const pieces = [];
  for (let j = 0; j < WIDTH; j += 1) if (columnUnit[j] === unit) pieces.push(j);
  return rowUnits.map((rows) => {
    let sum = 0;
    for (const row of rows) for (const j of pieces) sum += score(method, panel, row, j);
    return sum / rows.length;
  });
}

function totalOf(method, panel, unit) {
  const { totals } = methods[method].maps[panel];
  return totals && rowUnits[unit].reduce((sum, row) => sum + totals[row], 0) / rowUnits[unit].length;
}

// The mean absolute score of a row. A source that has more is said to matter.
function meanOf(method, panel, unit) {
  if (!methods[method].signed) return 1 / columnCount;
  const key = `${method} ${panel} ${unit}`;
  if (!means.has(key)) {
    means.set(key, rowOf(method, panel, unit, false).reduce((sum, one) => sum + Math.abs(one), 0) / columnCount);
  }
  return means.get(key);
}

const highestScale = (method) => Math.max(...methods[method].maps.map((map) => map.scale));
const highestTotal = (method) => Math.max(...methods[method].maps.flatMap((map) => map.totals || []));

function written(value, method, short = false) {
  if (methods[method].signed) return (value > 0 ? '+' : '') + value.toPrecision(short ? 2 : 3);
  if (state.raw) return value === 0 ? '0' : value.toPrecision(short ? 2 : 3);
  const text = value.toFixed(short || levels < 1000 ? 2 : 3);
  return short ? text.replace(/^0/, '') : text;
}

// ---------------------------------------------------------------- tokens and words

function setUnits() {
  const words = state.unit === 'words';
  const names = (side) => (words ? side.words : side.tokens);
  const count = names(data.rows).length;
  rowUnits = Array.from({ length: count }, () => []);
  data.rows.groups.forEach((group, i) => rowUnits[words ? group : i].push(i));
  columnUnit = words ? data.columns.groups : data.columns.groups.map((_, i) => i);
  columnCount = names(data.columns).length;
  means = new Map();
  const kinds = words ? data.columns.wordKinds : data.columns.kinds;
  items = names(data.columns).map((label, column) => ({ label, column, row: null, kind: kinds[column], block: 0 }));
  const rest = offset === null ? 0 : columnUnit[offset];
  const split = offset > 0 && offset + data.rows.tokens.length === WIDTH;
  names(data.rows).forEach((label, row) => {
    const own = offset === null ? null : items[columnUnit[rowUnits[row][0] + offset]];
    if (own && own.row === null) own.row = row;
    else items.push({ label, column: null, row, kind: 0, block: 1 });
  });
  if (split) for (const item of items) if (item.column >= rest) item.block = 1;
}

const blockNames = () => (offset === null ? ['Source tokens', 'Output tokens'] : ['Prompt', 'Generated tokens']);
const isOut = (item) => state.out.has(item.kind);
const itemOfRow = (row) => items.findIndex((item) => item.row === row);
const current = () => (state.quiz ? state.quiz.shown : state.pinned ?? state.hover ?? state.focus);

// The same map of another method: by its label, else at the same depth.
function panelIn(method) {
  if (method === state.method) return state.panel;
  const from = methods[state.method].maps;
  const to = methods[method].maps;
  const same = to.findIndex((map) => map.label === from[state.panel].label);
  if (same >= 0) return same;
  return from.length > 1 ? Math.round((state.panel * (to.length - 1)) / (from.length - 1)) : to.length - 1;
}

// ---------------------------------------------------------------- colors

const luminance = (color) => {
  const [r, g, b] = color.map((one) => ((one /= 255) <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};

// 65 backgrounds from the page's to the darkest or brightest, each with the text color of higher contrast.
function ramp(from, to) {
  return Array.from({ length: 65 }, (_, i) => {
    const color = from.map((one, k) => Math.round(one + ((to[k] - one) * i) / 64));
    const light = luminance(color);
    return [`rgb(${color})`, 1.05 / (light + 0.05) > (light + 0.05) / 0.05 ? '#fff' : '#000'];
  });
}

function setTheme() {
  root.dataset.theme = wantedTheme();
  const dark = root.dataset.theme === 'dark';
  const from = dark ? [22, 24, 29] : [255, 255, 255];
  ramps = [ramp(from, dark ? [127, 196, 255] : [8, 69, 148]), ramp(from, dark ? [255, 170, 110] : [150, 50, 0])];
}

// The theme of the notebook or site around the frame, else that of the system.
function wantedTheme() {
  if (WANTED_THEME !== 'auto') return WANTED_THEME;
  try {
    if (window.parent !== window) {
      const { body, documentElement: html } = window.parent.document;
      const named = [body.dataset.theme, html.dataset.theme, html.getAttribute('theme')];
      const jupyter = body.dataset.jpThemeLight;
      const has = (name) => body.classList.contains(name);
      if (jupyter === 'false' || has('vscode-dark') || has('vscode-high-contrast') || has('dark')) return 'dark';
      if (jupyter === 'true' || has('vscode-light')) return 'light';
      const found = named.find((one) => one === 'dark' || one === 'light');
      if (found) return found;
    }
  } catch { /* the page around the frame is of another origin */ }
  return window.matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light';
}

// How strong a color is, from 0 to 1. Raw values are paler where there was little to divide.
function strengths(row, method, panel, unit) {
  const size = Array.from(row, (one, c) => (isOut(items[c]) ? 0 : Math.abs(one)));
  const sum = state.raw && totalOf(method, panel, unit);
  const pale = sum === null || sum === false ? 1 : Math.sqrt(sum / (highestTotal(method) || 1));
  const highest = Math.max(...size) || 1;
  const whole = methods[method].signed ? highestScale(method) || 1 : sum || 1;
  return size.map((one) => pale * (state.scale === 'row' ? one / highest : Math.sqrt(Math.min(1, one / whole))));
}

const colorOf = (strength, value) => ramps[value < 0 ? 1 : 0][Math.round(64 * Math.min(1, strength))];

// ---------------------------------------------------------------- building

function element(tag, text = '', properties = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  return Object.assign(made, properties);
}

function isRightToLeft(labels) {
  const count = (pattern) => labels.filter((label) => pattern.test(label)).length;
  return count(/[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}]/u) > labels.length / 3;
}

function build() {
  const chosen = state.beside < 0 ? [state.method] : [state.method, state.beside];
  const blocks = [...new Set(items.map((item) => item.block))];
  shown = chosen.map((method) => {
    const box = element('div');
    const heading = element('h2');
    const view = { method, heading, buttons: [], strip: element('div'), canvas: element('canvas'), tip: element('p') };
    box.append(heading);
    for (const block of blocks) {
      const own = items.filter((item) => item.block === block);
      const name = blocks.length > 1 ? blockNames()[block] : 'Tokens';
      const flow = element('div', '', { className: 'flow', dir: isRightToLeft(own.map((item) => item.label)) ? 'rtl' : 'ltr' });
      flow.setAttribute('role', 'toolbar');
      flow.setAttribute('aria-label', [name, methods[method].name].filter(Boolean).join(', '));
      flow.classList.toggle('numbers', items.length <= MOST_NUMBERED);
      for (const item of own) {
        const index = items.indexOf(item);
        const button = element('button', item.label, { type: 'button', dir: 'auto', tabIndex: -1 });
        button.dataset.k = index;
        view.buttons[index] = button;
        flow.append(button);
      }
      flow.firstChild.tabIndex = 0;
      if (blocks.length > 1) box.append(element('h3', name));
      box.append(flow);
    }
    view.strip.className = 'strip';
    view.tip.className = 'tip';
    view.canvas.setAttribute('role', 'img');
    view.strip.append(element('div'), view.canvas);
    box.append(element('h3', 'Depth: the row of the chosen token in each layer'), view.strip, view.tip);
    view.box = box;
    listenToStrip(view);
    return view;
  });
  $('texts').replaceChildren(...shown.map((view) => view.box));
  paint();
}

// ---------------------------------------------------------------- painting

let planned = false;
function plan() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => { planned = false; paint(); });
}

function paint() {
  const map = methods[state.method].maps[state.panel];
  $('panel').setAttribute('aria-valuetext', map.label);
  $('name').textContent = map.label;
  const quiz = state.quiz && !state.quiz.open;
  for (const view of shown) {
    const panel = panelIn(view.method);
    view.heading.textContent = [methods[view.method].name, methods[view.method].maps[panel].label].filter(Boolean).join(', ');
    paintTokens(view, panel, quiz);
    view.strip.parentNode.classList.toggle('asking', Boolean(quiz));
    for (const one of [view.strip, view.strip.previousSibling, view.tip]) {
      one.hidden = Boolean(quiz) || methods[view.method].maps.length < 2;
    }
    if (!quiz) paintStrip(view, panel);
  }
  $('read').replaceChildren(...(quiz ? [] : sentences().map(paragraph)));
  $('table').hidden = Boolean(state.quiz);
  if ($('table').open) planTable();
}

function paintTokens(view, panel, quiz) {
  const now = current();
  const item = now === null || quiz ? null : items[now];
  const row = item && item.row !== null ? rowOf(view.method, panel, item.row) : null;
  const strength = row && strengths(row, view.method, panel, item.row);
  const column = item && item.column !== null ? columnOf(view.method, panel, item.column) : null;
  const numbered = items.length <= MOST_NUMBERED;
  const whole = methods[view.method].signed ? highestScale(view.method) || 1 : 1;
  items.forEach((other, k) => {
    const button = view.buttons[k];
    const c = other.column;
    const value = row && c !== null && !isOut(other) ? row[c] : 0;
    const [back, ink] = value ? colorOf(strength[c], value) : ['', ''];
    button.style.backgroundColor = back;
    button.style.color = ink;
    if (numbered) button.dataset.share = value && Math.abs(strength[c]) > 0.04 ? written(value, view.method, true) : '';
    const drawn = column && other.row !== null ? Math.abs(column[other.row]) : 0;
    const depends = drawn > meanOf(view.method, panel, other.row);
    button.style.borderBottom = depends ? `${Math.min(4, 1 + Math.round(3 * Math.sqrt(drawn / whole)))}px solid var(--mark)` : '';
    button.classList.toggle('depends', depends);
    button.classList.toggle('out', isOut(other));
    button.classList.toggle('now', k === (state.quiz ? state.quiz.asked : now));
    button.classList.toggle('pick', Boolean(state.quiz) && k === state.quiz.pick);
    button.setAttribute('aria-pressed', String(k === state.pinned));
  });
}

// Rows of the strip are maps, columns are sources. Token labels stand above it where there is room.
function paintStrip(view, panel) {
  const { canvas, strip } = view;
  const { maps } = methods[view.method];
  const item = current() === null ? null : items[current()];
  const labeled = columnCount <= MOST_LABELED;
  const high = maps.length > 16 ? 10 : 15;
  const style = getComputedStyle(root);
  const width = Math.max(60, canvas.clientWidth);
  const cell = Math.min(28, width / columnCount);
  const sources = items.filter((one) => one.column !== null).sort((a, b) => a.column - b.column);
  const pen = canvas.getContext('2d');
  pen.font = '11px system-ui, sans-serif';
  const above = labeled ? Math.min(90, Math.max(...sources.map((one) => pen.measureText(one.label).width)) + 6) : 0;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = (above + high * maps.length + 2) * ratio;
  canvas.style.height = `${above + high * maps.length + 2}px`;
  pen.scale(ratio, ratio);
  pen.font = '11px system-ui, sans-serif';
  pen.fillStyle = style.getPropertyValue('--dim');
  if (labeled) sources.forEach((one, c) => {
    pen.save();
    pen.translate((c + 0.5) * cell + 4, above - 3);
    pen.rotate(-Math.PI / 2);
    pen.fillText(one.label, 0, 0, above - 4);
    pen.restore();
  });
  const chosen = item && item.row !== null;
  maps.forEach((_, p) => {
    const row = chosen ? rowOf(view.method, p, item.row) : new Float64Array(columnCount);
    const strength = chosen ? strengths(row, view.method, p, item.row) : row;
    row.forEach((value, c) => {
      [pen.fillStyle] = colorOf(strength[c], value);
      pen.fillRect(c * cell, above + p * high, cell - (cell > 6 ? 1 : 0), high - 1);
    });
  });
  pen.strokeStyle = style.getPropertyValue('--mark');
  pen.lineWidth = 2;
  pen.strokeRect(1, above + panel * high, cell * columnCount - 2, high);
  const names = maps.map((map, p) => {
    const line = element('span', '', { title: map.label });
    line.append(element(p === panel ? 'b' : 'span', map.label));
    line.style.height = line.style.lineHeight = `${high}px`;
    return line;
  });
  strip.firstChild.style.paddingTop = `${above}px`;
  strip.firstChild.replaceChildren(...names);
  canvas.setAttribute('aria-label', chosen
    ? `Depth strip of ${item.label}: ${maps.length} maps by ${columnCount} sources. The table has its numbers.`
    : 'Depth strip, empty: no output token is chosen.');
  Object.assign(view, { cell, above, high, sources });
}

function listenToStrip(view) {
  const at = (event) => {
    const place = view.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - place.left) / view.cell);
    const panel = Math.floor((event.clientY - place.top - view.above) / view.high);
    return { source: view.sources[column], panel: methods[view.method].maps[panel] ? panel : -1 };
  };
  view.canvas.addEventListener('pointermove', (event) => {
    const { source, panel } = at(event);
    const item = current() === null ? null : items[current()];
    if (!source || panel < 0 || !item || item.row === null) { view.tip.textContent = ''; return; }
    const value = rowOf(view.method, panel, item.row)[source.column];
    view.tip.replaceChildren(`${methods[view.method].maps[panel].label}, `, element('bdi', source.label), `: ${written(value, view.method)}`);
  });
  view.canvas.addEventListener('pointerleave', () => { view.tip.textContent = ''; });
  view.canvas.addEventListener('click', (event) => {
    const { panel } = at(event);
    if (panel >= 0 && view.method === state.method) setPanel(panel);
  });
}

// ---------------------------------------------------------------- words about the numbers

// Sentences as lists of strings and {label}, so that labels can be isolated from the direction of the text.
function sentences() {
  const now = current();
  if (now === null) return [['No token is chosen.']];
  const item = items[now];
  return shown.flatMap(({ method }) => {
    const panel = panelIn(method);
    const name = shown.length > 1 ? [`${methods[method].name}: `] : [];
    const about = levels < 1000 ? 'about ' : '';
    const found = [];
    if (item.row !== null) {
      const row = rowOf(method, panel, item.row);
      const best = items.filter((one) => one.column !== null && !isOut(one) && row[one.column])
        .sort((a, b) => Math.abs(row[b.column]) - Math.abs(row[a.column])).slice(0, 5);
      const list = best.flatMap((one, i) => [i ? ', ' : '', { label: one.label }, ` ${written(row[one.column], method)}`]);
      found.push([...name, { label: item.label }, ` draws on ${list.length ? about : 'no shown token'}`, ...list, '.']);
      const total = totalOf(method, panel, item.row);
      if (total !== null) found[0].push(` There was ${total.toPrecision(3)} to divide, of at most ${highestTotal(method).toPrecision(3)}.`);
    }
    if (item.column !== null) {
      const column = columnOf(method, panel, item.column);
      const deep = items.filter((one) => one.row !== null && Math.abs(column[one.row]) > meanOf(method, panel, one.row))
        .sort((a, b) => Math.abs(column[b.row]) - Math.abs(column[a.row]));
      const list = deep.slice(0, 5).flatMap((one, i) => [i ? ', ' : '', { label: one.label }, ` ${shareText(column[one.row], method)}`]);
      const more = deep.length > 5 ? ` and ${deep.length - 5} more` : '';
      found.push([...name, deep.length ? 'Tokens that draw on ' : 'No token draws more than evenly on ', { label: item.label },
        deep.length ? `: ${about}` : '', ...list, `${more}.`]);
    }
    return found;
  });
}

function shareText(value, method) {
  return methods[method].signed ? written(value, method) : value.toFixed(levels < 1000 ? 2 : 3);
}

function paragraph(parts) {
  const made = element('p');
  made.append(...parts.map((part) => (part.label === undefined ? part : element('bdi', part.label))));
  return made;
}

let waiting;
function say(text) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { $('live').textContent = text; }, 150);
}

// Only what the keyboard, a tap or a setting changes is announced.
function announce() {
  const map = methods[state.method].maps[state.panel].label;
  say(`${map}. ${sentences().map((parts) => parts.map((part) => part.label ?? part).join('')).join(' ')}`);
}

// ---------------------------------------------------------------- the table

// The row of the chosen token in all maps; without a token the whole map.
function tableRows() {
  const item = current() === null ? null : items[current()];
  const sources = items.filter((one) => one.column !== null && !isOut(one)).sort((a, b) => a.column - b.column);
  if (item && item.row !== null) {
    const columns = shown.flatMap(({ method }) => methods[method].maps.map((map, panel) => ({
      name: [shown.length > 1 ? methods[method].name : '', map.label].filter(Boolean).join(', '), method, row: rowOf(method, panel, item.row),
    })));
    return {
      caption: `How much ${item.label} draws on each token`,
      rows: [['position', 'source', ...columns.map((one) => one.name)],
        ...sources.map((one) => [String(one.column), one.label, ...columns.map(({ row, method }) => written(row[one.column], method))])],
    };
  }
  const outputs = items.filter((one) => one.row !== null).sort((a, b) => a.row - b.row);
  const rows = () => outputs.map((one) => {
    const row = rowOf(state.method, state.panel, one.row);
    return [String(one.row), one.label, ...sources.map((source) => written(row[source.column], state.method))];
  });
  return {
    caption: `${shown[0].heading.textContent}: rows are output tokens`,
    rows: [['position', 'token', ...sources.map((one) => one.label)], ...rows()],
  };
}

let tabled;
function planTable() {
  clearTimeout(tabled);
  tabled = setTimeout(paintTable, 120);
}

function paintTable() {
  const item = current() === null ? null : items[current()];
  if ((!item || item.row === null) && items.length > MOST_WHOLE) {
    $('cells').replaceChildren(element('p', 'Choose an output token for its numbers. Copy table copies the whole map.'));
    return;
  }
  const { caption, rows: [heads, ...rows] } = tableRows();
  const table = element('table');
  const line = (cells, make) => { const made = element('tr'); made.append(...cells.map(make)); return made; };
  const head = element('thead');
  head.append(line(heads, (text) => element('th', text, { scope: 'col', dir: 'auto' })));
  const body = element('tbody');
  body.append(...rows.map((cells) => line(cells, (text, i) => (i === 1 ? element('th', text, { scope: 'row', dir: 'auto' }) : element('td', text)))));
  table.append(element('caption', caption, { dir: 'auto' }), head, body);
  $('cells').replaceChildren(table);
}

async function copy(text, done) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page without the permission
    const area = element('textarea', text);
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  done();
}

// ---------------------------------------------------------------- predict, then reveal

function startQuiz() {
  const possible = items.map((_, k) => k).filter((k) => items[k].row !== null && !isOut(items[k]) && allowed(items[k]).length > 1);
  let chosen = data.predict.map((row) => (state.unit === 'words' ? data.rows.groups[row] : row)).map(itemOfRow);
  chosen = [...new Set(chosen)].filter((k) => possible.includes(k));
  if (!chosen.length) {
    const some = possible.filter((k) => items[k].kind !== 1 && items[k].kind !== 3);
    const from = some.length ? some : possible;
    const count = Math.min(5, from.length);
    chosen = Array.from({ length: count }, (_, i) => from[count < 2 ? 0 : Math.round((i * (from.length - 1)) / (count - 1))]);
  }
  if (!chosen.length) { say('There is no token to ask about.'); return; }
  Object.assign(state, { pinned: null, hover: null, beside: -1 });
  state.quiz = { targets: chosen, at: -1, picks: [], points: [], open: false, asked: null, shown: null, pick: null };
  $('beside').value = '-1';
  build();
  nextQuestion();
}

// The sources that may be picked: not the token itself, not what is left out.
const allowed = (item) => items.filter((one) => one.column !== null && one !== item && !isOut(one));

function nextQuestion() {
  const { quiz } = state;
  quiz.at += 1;
  if (quiz.at >= quiz.targets.length) { endQuiz(); return; }
  Object.assign(quiz, { asked: quiz.targets[quiz.at], open: false, shown: null, pick: null });
  $('ask').hidden = false;
  $('next').hidden = $('handin').hidden = true;
  $('stop').textContent = 'Stop';
  for (const one of $('controls').querySelectorAll('select, input, button')) one.disabled = true;
  ask([`Question ${quiz.at + 1} of ${quiz.targets.length}: which other token does `, { label: items[quiz.asked].label },
    ` draw on most, in ${shown[0].heading.textContent}? Choose a token.`]);
  paint();
  focusToken(quiz.asked, 0);
}

function ask(parts) {
  $('question').replaceChildren(...paragraph(parts).childNodes);
  say(parts.map((part) => part.label ?? part).join(''));
}

function answer(k) {
  const { quiz } = state;
  const item = items[quiz.asked];
  if (quiz.open || !allowed(item).includes(items[k])) return;
  const row = rowOf(state.method, state.panel, item.row, false).map(Math.abs);
  const ranked = allowed(item).sort((a, b) => row[b.column] - row[a.column]);
  const own = row[items[k].column];
  const points = row[ranked[0].column] ? Math.round((100 * own) / row[ranked[0].column]) : 0;
  const rank = 1 + ranked.filter((one) => row[one.column] > own).length;
  quiz.picks.push(`${item.row}>${items[k].column}`);
  quiz.points.push(points);
  Object.assign(quiz, { open: true, shown: quiz.asked, pick: k });
  ask([points === 100 ? 'Right: ' : 'You chose ', { label: items[k].label }, ` has ${shareText(own, state.method)}, number ${rank} of ${ranked.length}.`,
    ...(points === 100 ? [] : [' The strongest is ', { label: ranked[0].label }, ` with ${shareText(row[ranked[0].column], state.method)}.`]), ` ${points} points.`]);
  $('next').hidden = false;
  $('next').textContent = quiz.at + 1 < quiz.targets.length ? 'Next question' : 'Show my score';
  paint();
  $('next').focus();
}

function endQuiz() {
  const { quiz } = state;
  const right = quiz.points.filter((one) => one === 100).length;
  const points = Math.round(quiz.points.reduce((sum, one) => sum + one, 0) / quiz.points.length);
  const out = [...state.out].sort().join('') || '-';
  Object.assign(quiz, { open: true, asked: null, shown: null, pick: null });
  $('result').value = `captum-vz-predict 1; page ${data.id}; method ${state.method}; map ${state.panel}; ${state.unit}; `
    + `without ${out}; ${quiz.picks.join(',')}; ${right} right; ${points} points`;
  $('next').hidden = true;
  $('handin').hidden = false;
  $('stop').textContent = 'Explore';
  ask([`Score: ${right} of ${quiz.points.length} right, ${points} of 100 points.`]);
  paint();
  $('result').focus();
}

function stopQuiz() {
  state.quiz = null;
  $('ask').hidden = true;
  for (const one of $('controls').querySelectorAll('select, input, button')) one.disabled = false;
  paint();
  $('start').focus();
}

// ---------------------------------------------------------------- events

function setPanel(panel) {
  state.panel = Math.max(0, Math.min(methods[state.method].maps.length - 1, panel));
  $('panel').value = state.panel;
  paint();
  announce();
}

function fitSlider() {
  const { maps } = methods[state.method];
  $('panel').max = maps.length - 1;
  $('panel').parentNode.hidden = maps.length < 2;
  state.panel = Math.min(state.panel, maps.length - 1);
  $('panel').value = state.panel;
}

function focusToken(k, view) {
  const button = shown[view].buttons[k];
  for (const one of button.parentNode.children) one.tabIndex = one === button ? 0 : -1;
  button.focus();
}

const viewOf = (button) => shown.findIndex((view) => view.buttons.includes(button));

function press(k) {
  if (state.quiz) { answer(k); return; }
  state.pinned = state.pinned === k ? null : k;
  paint();
  announce();
}

function onKey(event) {
  const button = event.target.closest('.flow button');
  if (!button) return;
  const all = [...button.parentNode.children];
  const at = all.indexOf(button);
  const ahead = button.parentNode.dir === 'rtl' ? -1 : 1;
  const lines = (sign) => {
    const here = button.getBoundingClientRect();
    const near = all.filter((one) => sign * (one.getBoundingClientRect().top - here.top) > 4);
    const top = Math.min(...near.map((one) => sign * one.getBoundingClientRect().top));
    const line = near.filter((one) => sign * one.getBoundingClientRect().top < top + 4);
    const distance = (one) => Math.abs(one.getBoundingClientRect().left - here.left);
    return all.indexOf(line.sort((a, b) => distance(a) - distance(b))[0]);
  };
  const moves = {
    ArrowRight: () => at + ahead, ArrowLeft: () => at - ahead, Home: () => 0, End: () => all.length - 1,
    ArrowDown: () => lines(1), ArrowUp: () => lines(-1),
  };
  if (moves[event.key]) {
    const goal = all[moves[event.key]()];
    if (goal) focusToken(Number(goal.dataset.k), viewOf(button));
  } else if (event.key === 'PageUp' || event.key === 'PageDown') {
    if (!state.quiz) setPanel(state.panel + (event.key === 'PageUp' ? 1 : -1));
  } else if (event.key === 'Escape') {
    if (!state.quiz) { state.pinned = null; paint(); announce(); }
  } else return;
  event.preventDefault();
}

function listen() {
  const texts = $('texts');
  const tokenOf = (event) => event.target.closest('.flow button');
  texts.addEventListener('pointerover', (event) => {
    const button = tokenOf(event);
    if (event.pointerType === 'touch') return;
    const k = button ? Number(button.dataset.k) : null;
    if (k !== state.hover) { state.hover = k; plan(); }
  });
  texts.addEventListener('pointerleave', () => { state.hover = null; plan(); });
  texts.addEventListener('focusin', (event) => {
    const button = tokenOf(event);
    if (!button) return;
    state.focus = Number(button.dataset.k);
    plan();
    if (!state.quiz && button.matches(':focus-visible')) announce();
  });
  texts.addEventListener('click', (event) => {
    const button = tokenOf(event);
    if (!button) return;
    focusToken(Number(button.dataset.k), viewOf(button));
    press(Number(button.dataset.k));
  });
  texts.addEventListener('keydown', onKey);
  $('panel').addEventListener('input', () => setPanel(Number($('panel').value)));
  $('method').addEventListener('change', () => {
    const label = methods[state.method].maps[state.panel].label;
    state.method = Number($('method').value);
    const same = methods[state.method].maps.findIndex((map) => map.label === label);
    state.panel = same < 0 ? methods[state.method].maps.length - 1 : same;
    fitSlider();
    build();
    announce();
  });
  $('beside').addEventListener('change', () => { state.beside = Number($('beside').value); build(); announce(); });
  $('unit').addEventListener('change', () => {
    const piece = (k) => (k === null ? null : items[k]);
    const old = piece(state.pinned);
    state.unit = $('unit').value;
    const before = { rows: rowUnits, columns: columnUnit };
    setUnits();
    Object.assign(state, { hover: null, focus: null, pinned: old && samePlace(old, before) });
    build();
    announce();
  });
  $('values').addEventListener('change', () => { state.raw = $('values').value === 'raw'; paint(); announce(); });
  $('scale').addEventListener('change', () => { state.scale = $('scale').value; paint(); });
  for (const box of document.querySelectorAll('fieldset input')) {
    box.addEventListener('change', () => {
      state.out[box.checked ? 'add' : 'delete'](Number(box.value));
      paint();
      announce();
    });
  }
  $('table').addEventListener('toggle', () => { if ($('table').open) paintTable(); });
  $('copy').addEventListener('click', () => {
    const { rows } = tableRows();
    copy(rows.map((cells) => cells.join('\t')).join('\n'), () => {
      $('copied').textContent = `Copied ${rows.length - 1} rows.`;
      say($('copied').textContent);
    });
  });
  $('start').addEventListener('click', startQuiz);
  $('next').addEventListener('click', nextQuestion);
  $('stop').addEventListener('click', stopQuiz);
  $('copyresult').addEventListener('click', () => copy($('result').value, () => say('Copied.')));
  window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', retheme);
  new ResizeObserver(plan).observe($('texts'));
}

// The item at the same place after a change of units.
function samePlace(item, before) {
  const piece = item.row === null ? before.columns.indexOf(item.column) : before.rows[item.row][0];
  const found = items.findIndex((one) => (item.row === null
    ? one.column === columnUnit[piece]
    : one.row !== null && rowUnits[one.row].includes(piece)));
  return found < 0 ? null : found;
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
    new ResizeObserver(() => { frame.style.height = `${Math.ceil(document.body.offsetHeight)}px`; }).observe(document.body);
    const watch = new MutationObserver(retheme);
    const { body, documentElement } = window.parent.document;
    for (const one of [body, documentElement]) watch.observe(one, { attributes: true, attributeFilter: ['class', 'theme', 'data-theme', 'data-jp-theme-light'] });
  } catch { /* the page around the frame is of another origin */ }
}

function fill() {
  const names = methods.map((method, i) => new Option(method.name || 'scores', i));
  $('method').append(...names);
  $('beside').append(new Option('none', -1), ...names.map((one) => one.cloneNode(true)));
  $('beside').value = '-1';
  for (const id of ['method', 'beside']) $(id).parentNode.hidden = methods.length < 2;
  const parts = [data.rows, data.columns].some((side) => side.words.length < side.tokens.length);
  $('unit').parentNode.hidden = !parts;
  $('values').parentNode.hidden = !methods.some((method) => method.maps.some((map) => map.totals));
  const kinds = new Set([...data.columns.kinds, ...data.columns.wordKinds]);
  for (const box of document.querySelectorAll('fieldset input')) box.parentNode.hidden = !kinds.has(Number(box.value));
  $('controls').querySelector('fieldset').hidden = ![1, 2, 3].some((kind) => kinds.has(kind));
}

async function start() {
  if (typeof DecompressionStream === 'undefined') {
    $('read').textContent = 'This browser cannot unpack the numbers (DecompressionStream is missing). The table after the view has some.';
    return;
  }
  numbers = await unpack(data.numbers);
  let next = 0;
  starts = methods.map((method) => method.maps.map(() => (next += 1) - 1));
  starts = starts.map((places) => places.map((place) => place * data.rows.tokens.length * WIDTH));
  state.panel = Math.min(data.layer, methods[0].maps.length - 1);
  setTheme();
  fill();
  fitSlider();
  setUnits();
  if (data.token !== null) state.pinned = itemOfRow(data.token);
  listen();
  build();
  fitFrame();
  if (data.predict.length) startQuiz();
  document.body.dataset.ready = '';
}

await start();
