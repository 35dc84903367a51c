"use strict";
// The run's page: charts over steps, a step by a click, rows that are marked. All numbers are in `values`.
const run = JSON.parse(document.getElementById("values").textContent);
const byId = (id) => document.getElementById(id);
const COLORS = ["#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#6cc5b0", "#9c6b4e", "#ff8ab7", "#97bbf5", "#9498a0"];
const streams = run.streams, stop = () => run.first + run.given.length;
const token = new URLSearchParams(location.search).get("token");
let now = null;
const marked = new Map();

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    key === "onclick" ? made.addEventListener("click", value) : made.setAttribute(key, value);
  made.append(...children);
  return made;
}
function drawn(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
const count = (n) => n.toLocaleString("en");
const short = (v) => (Math.abs(v) >= 100 ? v.toFixed(0) : Math.abs(v) >= 1 ? v.toFixed(2) : v.toPrecision(2));

// --- Charts. A line is {name, points: [[step, value], ...], color, dashed}.
const WIDTH = 960, HEIGHT = 230, LEFT = 52, RIGHT = 12, TOP = 12, BOTTOM = 24;
const charts = [];
const across = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - run.first)) / Math.max(stop() - 1 - run.first, 1);

function chart(id, lines, unit, least = 0) {
  const place = byId(id);
  place.replaceChildren();
  const all = lines.flatMap((line) => line.points.map((point) => point[1]));
  if (!all.length) return false;
  let low = least, high = -Infinity;
  for (const value of all) { low = Math.min(low, value); high = Math.max(high, value); }
  if (high <= low) high = low + 1;
  const up = (value) => HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (value - low)) / (high - low);
  const svg = drawn("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  for (let part = 0; part <= 4; part++) {
    const value = low + ((high - low) * part) / 4;
    svg.append(drawn("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: up(value), y2: up(value) }));
    svg.append(drawn("text", { x: LEFT - 6, y: up(value) + 4, "text-anchor": "end" }, short(value) + unit));
    const step = Math.round(run.first + ((stop() - 1 - run.first) * part) / 4);
    svg.append(drawn("text", { x: across(step), y: HEIGHT - 6, "text-anchor": part === 4 ? "end" : "middle" }, count(step)));
  }
  for (const [kind, found] of [["edit", run.edits], ["decision", run.decisions], ["fault", run.faults]])
    for (const one of found)
      svg.append(drawn("line", { class: kind, x1: across(one.step), x2: across(one.step), y1: TOP, y2: HEIGHT - BOTTOM }));
  for (const line of lines) {
    const path = line.points.map(([x, y]) => `${across(x).toFixed(1)},${up(y).toFixed(1)}`).join(" ");
    const dash = line.dashed ? { "stroke-dasharray": "5 4" } : {};
    svg.append(drawn("polyline", { points: path, fill: "none", stroke: line.color, "stroke-width": 1.8, ...dash }));
  }
  const cursor = drawn("line", { class: "cursor", x1: -9, x2: -9, y1: TOP, y2: HEIGHT - BOTTOM });
  svg.append(cursor);
  charts.push((step) => { cursor.setAttribute("x1", across(step)); cursor.setAttribute("x2", across(step)); });
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) * WIDTH) / box.width;
    const part = (x - LEFT) / (WIDTH - LEFT - RIGHT);
    show(Math.round(run.first + part * (stop() - 1 - run.first)));
  });
  const key = element("ul", { class: "key" });
  for (const line of lines.filter((one) => one.name)) {
    const color = element("i");
    color.style.background = line.color;
    key.append(element("li", {}, color, line.name));
  }
  place.append(svg, key);
  return true;
}

function means(rows, width) { // of neighbouring steps, where there are more than points to draw
  const found = [];
  for (let at = 0; at < rows.length; at += width) {
    const part = rows.slice(at, at + width), sums = part[0].map((_, s) => part.reduce((sum, row) => sum + row[s], 0));
    const total = sums.reduce((sum, one) => sum + one, 0) || 1;
    found.push([run.first + at + (part.length - 1) / 2, sums.map((one) => (100 * one) / total)]);
  }
  return found;
}

function draw() {
  charts.length = 0;
  const sums = streams.map((_, s) => run.given.reduce((sum, row) => sum + row[s], 0));
  const largest = streams.map((_, s) => s).sort((a, b) => sums[b] - sums[a]).slice(0, COLORS.length);
  const width = Math.max(1, Math.ceil(run.given.length / 240));
  const given = means(run.given, width), asked = means(run.asked, width), lines = [];
  largest.forEach((s, place) => {
    lines.push({ name: "", points: asked.map(([x, row]) => [x, row[s]]), color: COLORS[place], dashed: true });
    lines.push({ name: streams[s], points: given.map(([x, row]) => [x, row[s]]), color: COLORS[place] });
  });
  chart("mixture", lines, " %");
  byId("mixture-more").textContent = streams.length > largest.length
    ? `The ${largest.length} largest of ${streams.length} streams; a click on a step lists all.` : "";
  const losses = Object.entries(run.losses).map(([name, points], s) => ({ name, points, color: COLORS[s % COLORS.length] }));
  byId("losses-none").hidden = chart("losses", losses, "", Infinity);
  const ranks = Object.entries(run.waits).map(([rank, points]) => [rank, points, points.reduce((sum, p) => sum + p[1], 0)]);
  ranks.sort((a, b) => b[2] - a[2]);
  const waits = ranks.slice(0, COLORS.length).map(([rank, points], s) => ({ name: `rank ${rank}`, points, color: COLORS[s] }));
  byId("waits-none").hidden = chart("waits", waits, " s");
  const worst = byId("slow");
  worst.replaceChildren();
  for (const [rank, points, sum] of ranks.slice(0, 8)) {
    const [step, longest] = points.reduce((most, point) => (point[1] > most[1] ? point : most), points[0]);
    const cells = [rank, short(sum) + " s", short(longest) + " s", count(step)].map((text) => element("td", {}, text));
    worst.append(element("tr", { onclick: () => show(step) }, ...cells));
  }
  byId("slow-table").hidden = !ranks.length;
  const events = byId("events");
  events.replaceChildren();
  const happened = [
    ...run.edits.map((one) => [one.step, `edit of ${one.keys.join(", ")}`]),
    ...run.faults.map((one) => [one.step, one.text]),
    ...run.spikes.map((step) => [step, "a loss jumps"]),
    ...run.decisions.map((one) => [one.step, one.fault ? `the policy failed: ${one.fault}`
      : `decision: ${Object.entries(one.shares).map(([name, share]) => `${name} ${share} %`).join(", ")}`]),
  ].sort((a, b) => a[0] - b[0]);
  for (const [step, text] of happened.slice(0, 300))
    events.append(element("li", {}, element("button", { onclick: () => show(step) }, `step ${count(step)}`), " " + text));
  if (happened.length > 300) events.append(element("li", {}, `and ${count(happened.length - 300)} more`));
  byId("events-none").hidden = events.children.length > 0;
  if (now !== null) charts.forEach((move) => move(now));
}

// --- A step.
async function show(step) {
  now = Math.min(Math.max(step, run.first), stop() - 1);
  charts.forEach((move) => move(now));
  byId("step-name").textContent = `Step ${count(now)}`;
  byId("step-number").value = now;
  location.hash = `step-${now}`;
  const at = now - run.first;
  const total = run.given[at].reduce((sum, one) => sum + one, 0) || 1;
  const rows = streams.map((name, s) => [name, run.asked[at][s], run.given[at][s]]).filter((row) => row[1] || row[2]);
  const body = byId("step-streams");
  body.replaceChildren();
  for (const [name, share, tokens] of rows) {
    const loss = (run.losses[name] || []).find((point) => point[0] === now);
    const cells = [name, (100 * share).toFixed(2) + " %", ((100 * tokens) / total).toFixed(2) + " %", count(tokens), loss ? loss[1].toFixed(4) : ""];
    body.append(element("tr", {}, ...cells.map((text) => element("td", {}, text))));
  }
  byId("step-facts").textContent =
    `digest ${run.digests[at]}, filled ${(100 * run.fill[at]).toFixed(1)} %, balance ${run.balance[at]} x the lower bound (hash order ${run.hash_order[at]})`;
  const shown = now, place = byId("step-samples");
  let details = run.details[now];
  if (!details && token !== null) {
    place.textContent = "reading ...";
    const answer = await fetch(`step?n=${now}&token=${encodeURIComponent(token)}`);
    details = answer.ok ? await answer.json() : { error: await answer.text() };
    run.details[now] = details;
  }
  if (shown !== now) return;
  place.replaceChildren();
  if (!details) {
    place.append(element("p", {}, "The page has no documents of this step. This command writes a page that has:"),
      element("pre", { class: "commands" }, `torchmix report ${run.command} --texts ${now}`));
    return;
  }
  if (details.error) { place.textContent = details.error; return; }
  if (details.html) {
    const content = element("div");
    content.innerHTML = details.html; // texts in it are escaped
    for (const line of content.querySelectorAll("p.of[data-row]")) line.prepend(markOf(line.dataset.row));
    place.append(content);
    return;
  }
  const heads = ["row", "sample", "dp rank", "microbatch", "tokens", "of document"];
  const table = element("tbody");
  for (const [sample, rank, microbatch, source, row, start, tokens, whole] of details.pieces) {
    const first = element("td", {}, markOf(`${source}:${row}`), ` ${source}:${row}`);
    const cells = [sample, rank, microbatch, `${count(start)} to ${count(start + tokens)}`, count(whole)];
    table.append(element("tr", {}, first, ...cells.map((text) => element("td", {}, String(text)))));
  }
  place.append(element("p", { class: "dim" }, "Their texts are not in this page: "),
    element("pre", { class: "commands" }, `torchmix show ${run.recipe} --step ${now} --html step-${now}.html`),
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads.map((h) => element("th", {}, h)))), table)));
}

// --- Rows that are marked: a list, and the commands that take them out of the run.
function markOf(row) {
  const box = element("input", { type: "checkbox", "data-mark": row, title: `mark ${row}` });
  box.checked = marked.has(row);
  box.addEventListener("change", () => mark(row, box.checked));
  return box;
}
function mark(row, is) {
  is ? marked.set(row, now) : marked.delete(row);
  for (const box of document.querySelectorAll("input[data-mark]")) if (box.dataset.mark === row) box.checked = is;
  byId("marked-section").hidden = !marked.size;
  byId("marked").value = [...marked.keys()].join("\n") + "\n";
  byId("marked-count").textContent = marked.size === 1 ? "1 row is marked" : `${count(marked.size)} rows are marked`;
}
byId("save").addEventListener("click", () => {
  const link = element("a", { href: URL.createObjectURL(new Blob([byId("marked").value])), download: "marked.txt" });
  link.click();
  URL.revokeObjectURL(link.href);
});
byId("copy").addEventListener("click", () => { byId("marked").select(); document.execCommand("copy"); });
byId("unmark").addEventListener("click", () => [...marked.keys()].forEach((row) => mark(row, false)));
byId("step-before").addEventListener("click", () => show((now ?? run.first) - 1));
byId("step-after").addEventListener("click", () => show((now ?? run.first - 1) + 1));
byId("step-number").addEventListener("change", (event) => show(Number(event.target.value)));

// --- A page that is served looks at the running processes, too.
async function look() {
  const answer = await fetch(`live?token=${encodeURIComponent(token)}`);
  if (!answer.ok) return;
  const found = await answer.json(), body = byId("live-processes");
  byId("live").hidden = false;
  body.replaceChildren();
  for (const one of found.processes) body.append(element("tr", {}, ...one.cells.map((text) => element("td", {}, text))));
  byId("live-events").textContent = found.events.join("\n") || "nothing has happened";
  byId("live-none").hidden = found.processes.length > 0;
}
draw();
if (token !== null) { look(); setInterval(look, 2000); }
const asked = /^#step-(\d+)$/.exec(location.hash);
show(asked ? Number(asked[1]) : run.spikes.length ? run.spikes[0] : stop() - 1);
