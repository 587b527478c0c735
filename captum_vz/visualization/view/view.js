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
// `map` of the slider, `beside` (a second method), `raw`, `byRow`, `out` (the kinds that are left out), `pinned`, `hover`,
// `focus` (items), `quiz`.
const state = { out: new Set() };
let numbers, rowUnits, columnUnit, columnCount, items, sources, shown, ramps, means;

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
  const kinds = words ? data.columns.wordKinds : data.columns.kinds;
  sources = names(data.columns).map((label, column) => ({ label, column, kind: kinds[column], block: 0 }));
  items = [...sources];
  names(data.rows).forEach((label, row) => {
    const own = offset === null ? null : sources[columnUnit[rowUnits[row][0] + offset]];
    if (own && own.row === undefined) own.row = row;
    else items.push({ label, row, kind: 0, block: 1 });
  });
  // Generated tokens follow their prompt.
  if (offset && offset + data.rows.tokens.length === width) for (const one of sources.slice(columnUnit[offset])) one.block = 1;
}

const isOut = (item) => state.out.has(item.kind);
const size = Math.abs;
const current = () => (state.quiz ? state.quiz.open && state.quiz.asked : state.pinned || state.hover || state.focus);

// The map of a method at the slider: the one of the same label, else at the same depth.
function mapIn({ maps }) {
  const from = state.map.method.maps;
  const depth = from.length > 1 ? from.indexOf(state.map) / (from.length - 1) : 1;
  return maps.find((map) => map.label === state.map.label) || maps[Math.round(depth * (maps.length - 1))];
}

const joined = (...names) => names.filter(Boolean).join(', ');
const nameOf = (map) => joined(map.method.name, map.label);

// ---------------------------------------------------------------- colors

// 65 backgrounds from the page's to the strongest, each with the text color of higher contrast.
function ramp(from, to) {
  return Array.from({ length: 65 }, (_, i) => {
    const color = from.map((one, k) => Math.round(one + ((to[k] - one) * i) / 64));
    const [r, g, b] = color.map((one) => (one > 10 ? ((one / 255 + 0.055) / 1.055) ** 2.4 : one / 3295));
    return [`rgb(${color})`, (0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05) ** 2 < 0.0525 ? '#fff' : '#000'];
  });
}

function setTheme() {
  root.dataset.theme = wantedTheme === 'auto' ? themeAround() || (darkSystem.matches ? 'dark' : 'light') : wantedTheme;
  const [back, blue, orange] = root.dataset.theme === 'dark'
    ? [[22, 24, 29], [127, 196, 255], [255, 170, 110]]
    : [[255, 255, 255], [8, 69, 148], [150, 50, 0]];
  ramps = [ramp(back, blue), ramp(back, orange)];
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

function build() {
  const { method } = state.map;
  const blocks = !items.some((item) => item.block) ? ['Tokens'] : offset === null ? ['Source tokens', 'Output tokens'] : ['Prompt', 'Generated tokens'];
  shown = [method, state.beside].filter(Boolean).map((one) => {
    const view = {
      method: one, heading: element('h2'), buttons: new Map(), names: element('div'),
      canvas: element('canvas', '', { role: 'img' }), tip: element('p', '', { className: 'tip' }),
    };
    view.leftwards = isRightToLeft(sources);
    const strip = element('div', [view.names, view.canvas], { className: 'strip', dir: view.leftwards ? 'rtl' : 'ltr' });
    view.depth = element('div', [element('h3', 'Depth: the row of the chosen token in each layer'), strip, view.tip]);
    const flows = blocks.flatMap((name, block) => {
      const own = items.filter((item) => item.block === block);
      const flow = element('div', own.map((item) => {
        const button = element('button', item.label, { dir: 'auto', tabIndex: -1, item, view });
        view.buttons.set(item, button);
        return button;
      }), {
        className: numbered ? 'flow numbers' : 'flow', dir: isRightToLeft(own) ? 'rtl' : 'ltr',
        role: 'toolbar', ariaLabel: joined(name, one.name),
      });
      flow.firstChild.tabIndex = 0;
      return blocks[1] ? [element('h3', name), flow] : [flow];
    });
    listenToStrip(view);
    view.box = element('div', [view.heading, ...flows, view.depth]);
    return view;
  });
  $('texts').replaceChildren(...shown.map(({ box }) => box));
  paint();
}

// ---------------------------------------------------------------- painting

let planned;
function plan() {
  planned ??= requestAnimationFrame(paint);
}

function paint() {
  planned = null;
  const item = current();
  const asking = state.quiz && !state.quiz.open;
  $('name').textContent = state.map.label;
  $('panel').ariaValueText = state.map.label;
  for (const view of shown) {
    view.map = mapIn(view.method);
    view.heading.textContent = nameOf(view.map);
    view.depth.hidden = asking || (state.quiz && !item) || view.method.maps.length < 2;
    paintTokens(view, item);
    if (!view.depth.hidden) paintStrip(view, item);
  }
  $('read').replaceChildren(...(asking ? [] : sentences(item).map((parts) => element('p', parts.map(isolated)))));
  $('table').hidden = Boolean(state.quiz);
  clearTimeout(tabled);
  if ($('table').open) tabled = setTimeout(paintTable, 120);
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
    const drawn = column && other.row >= 0 ? size(column[other.row]) : 0;
    const depends = drawn > 0 && drawn > meanOf(map, other.row);
    const thick = 1 + Math.round(3 * Math.sqrt(drawn / (map.method.signed ? map.method.scale : 1)));
    button.style.borderBottom = depends ? `${Math.min(4, thick)}px solid var(--mark)` : '';
    const classes = {
      depends, out: isOut(other), now: other === (state.quiz ? state.quiz.asked : item), pick: other === state.quiz?.pick,
    };
    button.className = Object.keys(classes).filter((one) => classes[one]).join(' ');
    button.ariaPressed = other === state.pinned;
  }
}

const shortened = (label) => (label.length > 14 ? `${[...label].slice(0, 13).join('')}\u2026` : label);

// Rows of the strip are maps, columns are sources in the direction of the text, with their labels where there is room.
function paintStrip(view, item) {
  const { canvas, names, leftwards, method: { maps } } = view;
  const style = getComputedStyle(root);
  const pen = canvas.getContext('2d');
  const font = '11px system-ui, sans-serif';
  const high = maps.length > 16 ? 12 : 15;
  const wide = Math.max(60, canvas.clientWidth);
  const cell = Math.min(28, wide / columnCount);
  pen.font = font;
  const left = (c) => (leftwards ? wide - (c + 1) * cell : c * cell);
  const labels = sources.map((one) => shortened(one.label));
  const above = cell > 9 ? Math.min(120, Math.max(...labels.map((one) => pen.measureText(one).width)) + 6) : 0;
  const tall = above + high * maps.length + 2;
  const ratio = devicePixelRatio;
  Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
  canvas.style.height = `${tall}px`;
  pen.scale(ratio, ratio);
  Object.assign(pen, { font, textAlign: 'left' });
  pen.fillStyle = style.getPropertyValue('--dim');
  if (above) {
    pen.rotate(-Math.PI / 2);
    labels.forEach((one, c) => pen.fillText(one, 3 - above, left(c) + cell / 2 + 4, above - 4));
    pen.rotate(Math.PI / 2);
  }
  if (item?.row >= 0) {
    maps.forEach((map, p) => {
      const row = rowOf(map, item.row);
      const strength = strengths(row, map, item.row);
      row.forEach((value, c) => {
        [pen.fillStyle] = colorOf(strength[c], value);
        pen.fillRect(left(c), above + p * high, cell - (cell > 6), high - 1);
      });
    });
  }
  pen.strokeStyle = style.getPropertyValue('--mark');
  pen.lineWidth = 2;
  pen.strokeRect(1 + (leftwards ? left(columnCount - 1) : 0), above + maps.indexOf(view.map) * high, cell * columnCount - 2, high);
  names.style.paddingTop = `${above}px`;
  names.replaceChildren(...maps.map((map) => element(map === view.map ? 'b' : 'span', map.label, { style: `line-height: ${high}px` })));
  canvas.ariaLabel = `Depth strip of ${item ? item.label : 'no token'}: ${maps.length} maps, ${columnCount} sources. The table has its numbers.`;
  Object.assign(view, { above, high, columnAt: (x) => Math.floor((leftwards ? wide - x : x) / cell) });
}

function listenToStrip(view) {
  const { canvas, tip, method: { maps } } = view;
  const mapAt = (event) => maps[Math.floor((event.offsetY - view.above) / view.high)];
  canvas.onpointermove = (event) => {
    const map = mapAt(event);
    const item = current();
    const source = sources[view.columnAt(event.offsetX)];
    const known = map && source && item?.row >= 0;
    tip.replaceChildren(...(known ? [`${map.label}, `, element('bdi', source.label), `: ${written(rowOf(map, item.row)[source.column], map)}`] : []));
  };
  canvas.onpointerleave = () => tip.replaceChildren();
  canvas.onclick = (event) => {
    const map = mapAt(event);
    if (map) setMap(state.map.method === view.method ? map : state.map.method.maps.find((one) => one.label === map.label));
  };
}

// ---------------------------------------------------------------- words about the numbers

// Sentences as lists of strings and items, whose labels are isolated from the direction of the text.
function sentences(item) {
  if (!item) return state.quiz ? [] : [['No token is chosen.']];
  const about = rough ? '\u2248\u00a0' : '';
  const listed = (found, value) => found.slice(0, 5).flatMap((one, i) => [i ? ', ' : '', one, ` ${about}${value(one)}`]);
  return shown.flatMap(({ map }) => {
    const found = [];
    const name = shown.length > 1 ? `${map.method.name}: ` : '';
    if (item.row >= 0) {
      const row = rowOf(map, item.row);
      const best = sources.filter((one) => row[one.column] && !isOut(one)).sort((a, b) => size(row[b.column]) - size(row[a.column]));
      const total = totalOf(map, item.row);
      found.push([name, item, best.length ? ' draws on ' : ' draws on no token that is shown',
        ...listed(best, (one) => written(row[one.column], map)), '.',
        total === null ? '' : ` There was ${total.toPrecision(3)} to divide, of at most ${map.method.total.toPrecision(3)}.`]);
    }
    if (item.column >= 0) {
      const column = columnOf(map, item.column);
      const deep = items.filter((one) => one.row >= 0 && size(column[one.row]) > meanOf(map, one.row))
        .sort((a, b) => size(column[b.row]) - size(column[a.row]));
      found.push(deep.length
        ? [name, 'Tokens that draw on ', item, ': ', ...listed(deep, (one) => written(column[one.row], map, false, false)), deep.length > 5 ? ` and ${deep.length - 5} more.` : '.']
        : [name, 'No token draws more than evenly on ', item, '.']);
    }
    return found;
  });
}

const isolated = (part) => (part.label === undefined ? part : element('bdi', part.label));
const spoken = (parts) => parts.map((part) => part.label ?? part).join('');

let waiting, tabled;
function say(text) {
  clearTimeout(waiting);
  waiting = setTimeout(() => { $('live').textContent = text; }, 150);
}

// Only what the keyboard, a tap or a setting changes is announced.
function show() {
  paint();
  say([state.map.label, ...sentences(current()).map(spoken)].join('. '));
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
  const targets = given.length ? [...new Set(given)] : spread;
  if (!targets.length) { say('There is no token to ask about.'); return; }
  Object.assign(state, { pinned: null, beside: null, quiz: { targets, at: -1, picks: [], points: [] } });
  $('beside').value = -1;
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
  $('handin').hidden = $('controls').disabled = true;
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
  state.quiz = null;
  $('ask').hidden = true;
  $('controls').disabled = false;
  paint();
  $('start').focus();
}

// ---------------------------------------------------------------- events

function setMap(map) {
  if (!map || state.quiz) return;
  state.map = map;
  $('panel').max = map.method.maps.length - 1;
  $('panel').value = map.method.maps.indexOf(map);
  $('panel').parentNode.hidden = map.method.maps.length < 2;
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
  const layer = (by) => setMap(state.map.method.maps[Number($('panel').value) + by]);
  const act = {
    ArrowRight: () => near(1), ArrowLeft: () => near(-1), Home: () => all[0], End: () => all.at(-1),
    ArrowUp: () => layer(1), ArrowDown: () => layer(-1), Escape: () => pin(),
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
  $('panel').oninput = () => setMap(state.map.method.maps[$('panel').value]);
  $('method').onchange = () => { setMap(mapIn(methods[$('method').value])); build(); };
  $('beside').onchange = () => { state.beside = methods[$('beside').value]; build(); show(); };
  $('unit').onchange = setUnitsAndPin;
  $('values').onchange = () => { state.raw = $('values').value === 'raw'; show(); };
  $('scale').onchange = () => { state.byRow = $('scale').value === 'row'; show(); };
  $('filter').onchange = ({ target }) => { state.out[target.checked ? 'add' : 'delete'](Number(target.value)); show(); };
  $('table').ontoggle = paintTable;
  $('copy').onclick = () => {
    const { rows } = tableOf(current());
    copy(rows.map((cells) => cells.join('\t')).join('\n'), `Copied ${rows.length - 1} rows.`);
  };
  $('start').onclick = startQuiz;
  $('next').onclick = nextQuestion;
  $('stop').onclick = stopQuiz;
  $('copyresult').onclick = () => copy($('result').value, 'Copied the result.');
  darkSystem.onchange = retheme;
  new ResizeObserver(plan).observe(texts);
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
  const names = methods.map((method, i) => new Option(method.name || 'scores', i));
  $('method').append(...names);
  $('beside').append(new Option('none', -1), ...names.map((one) => one.cloneNode(true)));
  const hide = (one, hidden) => { one.parentNode.hidden = hidden; };
  hide($('method'), methods.length < 2);
  hide($('beside'), methods.length < 2);
  hide($('unit'), ![data.rows, data.columns].some((side) => side.words.length < side.tokens.length));
  hide($('values'), !methods.some((method) => method.maps.some((map) => map.totals)));
  const kinds = [...data.columns.kinds, ...data.columns.wordKinds].map(String);
  for (const box of $('filter').querySelectorAll('input')) hide(box, !kinds.includes(box.value));
  $('filter').hidden = kinds.every((kind) => kind === '0');
}

if (typeof DecompressionStream === 'undefined') {
  $('read').textContent = 'This browser has no DecompressionStream.';
} else {
  await unpack();
  setTheme();
  fillSettings();
  setUnits();
  const { maps } = methods[0];
  state.map = maps[Math.min(data.layer, maps.length - 1)];
  state.pinned = items.find((item) => item.row === data.token);
  listen();
  build();
  setMap(state.map);
  fitFrame();
  if (data.predict.length) startQuiz();
  document.body.dataset.ready = '';
}
