(() => {
"use strict";

/* All texts of the document are hostile: they reach the page by text nodes only, never as markup. */

const TERMINAL = new Set(["Complete", "Failed", "Cancelled", "Deleted"]);
const LOG_LINES = 5000;      // kept of each rank
const SHOWN_LINES = 2000;    // of the log
const SHOWN_RANKS = 100;     // before "Show all"
const SHOWN_JOBS = 200;
const TABLE_ROWS = 500;      // of a table of values
const LONG_TEXT = 600;       // characters; a longer text scrolls
const LONG_NAME = 120;       // characters of a name where there is one line for it
const STALE_SECONDS = 10;
const SLOWEST_SECONDS = 30;  // between two requests after errors
const FILTER_FROM = 8;       // more charts than this have a filter

// ---------------------------------------------------------------- elements

const SVG = "http://www.w3.org/2000/svg";

/** An element: "tag.class.class", attributes, children. Functions are listeners, `style` is a map of properties. */
function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = name === "svg" || name === "path" ? document.createElementNS(SVG, name) : document.createElement(name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value == null || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else if (key === "style") for (const [property, each] of Object.entries(value)) element.style.setProperty(property, each);
    else element.setAttribute(key, value === true ? "" : value);
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child != null && child !== false && child !== "") element.append(child);
  }
}

/** Controls of the direction of text reorder what a person reads. */
const plain = text => String(text ?? "").replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

/** Text of the document, isolated from the direction of the texts around it. */
function bdi(shown) {
  const text = plain(shown);
  return text.length > LONG_TEXT ? h("bdi.long", { tabindex: "0" }, text) : h("bdi", null, text);
}

/** The start of a name, where there is one line for it. */
function named(text) {
  const all = plain(text);
  return all.length > LONG_NAME ? h("bdi", { title: all.slice(0, 2000) }, `${all.slice(0, LONG_NAME)}…`) : h("bdi", null, all);
}

const cut = text => plain(text).slice(0, LONG_NAME);

/** Make the children of `parent` equal to `children`; equal nodes stay, and so do focus, selection and scroll position. */
function render(parent, ...children) {
  const made = document.createDocumentFragment();
  add(made, children);
  patchChildren(parent, [...made.childNodes]);
}

function patchChildren(parent, fresh) {
  fresh.forEach((node, index) => {
    const old = parent.childNodes[index];
    if (old) patch(old, node);
    else parent.append(node);
  });
  while (parent.childNodes.length > fresh.length) parent.lastChild.remove();
}

function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    // A person opens and closes details.
    if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) === value) continue;
    if (name === "style") old.style.cssText = fresh.style.cssText;
    else old.setAttribute(name, value);
  }
  patchChildren(old, [...fresh.childNodes]);
}

const ICONS = {
  good: "M3.5 8.5l3 3 6-7",
  bad: "M4.5 4.5l7 7M11.5 4.5l-7 7",
  warn: "M8 2.5L14.5 13.5H1.5ZM8 6.5v3.2M8 11.4v.4",
  run: "M5 3.5l7 4.5-7 4.5z",
  wait: "M8 2.2a5.8 5.8 0 1 0 .01 0M8 4.8V8l2.2 1.6",
  loop: "M13 8a5 5 0 1 1-1.6-3.7M12.2 1.8v3h-3",
  off: "M5.5 4v8M10.5 4v8",
  table: "M2.5 3.5h11v9h-11zM2.5 6.5h11M6.5 3.5v9",
  enlarge: "M9.5 2.5h4v4M6.5 13.5h-4v-4M13.5 2.5l-4.5 4.5M2.5 13.5l4.5-4.5",
};

const icon = name =>
  h("svg.icon", { viewBox: "0 0 16 16", "aria-hidden": "true", focusable: "false" }, h("path", { d: ICONS[name] }));

const PHASES = {
  Complete: ["good", "good"], Failed: ["bad", "bad"], Running: ["info", "run"], Restarting: ["warn", "loop"],
  Queued: ["warn", "wait"], NotStarted: ["quiet", "wait"], Initializing: ["info", "wait"], Starting: ["info", "wait"],
};

/** A value of a map whose keys are texts of the document, which can be "constructor". */
const own = (map, key) => (map && Object.hasOwn(map, key) ? map[key] : undefined);

function pill(phase) {
  const [tone, sign] = own(PHASES, phase) || ["quiet", "off"];
  return h(`span.pill.${tone}`, null, icon(sign), named(phase || "unknown"));
}

/** A link if the URI is one of http or https; else the text alone. */
const uri = text => (/^https?:\/\//i.test(text) ? link(text, bdi(text)) : bdi(text));

/** The URL of an address that is http, https or relative, else null. */
function safe(address) {
  try {
    const url = address ? new URL(address, "https://relative.invalid/") : null;
    return url && ["http:", "https:"].includes(url.protocol) ? url : null;
  } catch {
    return null;
  }
}

/** A link if the address is safe, else the text alone. */
function link(address, ...children) {
  const url = safe(address);
  if (!url) return h("span", null, children);
  const elsewhere = url.hostname !== "relative.invalid";
  return h("a", { href: address, ...(elsewhere && { target: "_blank", rel: "noopener noreferrer", click: openOutside }) }, children);
}

/** Airflow shows the page in a frame that may open no window. The page around it, of the same origin, opens it instead. */
function openOutside(event) {
  if (window.parent === window) return;
  try {
    const outside = window.parent.document.createElement("a");
    Object.assign(outside, { href: event.currentTarget.href, target: "_blank", rel: "noopener noreferrer" });
    outside.click();
    event.preventDefault();
  } catch { /* the page around it is of another origin: the browser decides */ }
}

// ---------------------------------------------------------------- texts

const plural = (count, noun) => `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
const joined = (...parts) =>
  parts.flat().filter(Boolean).flatMap((part, index) => (index ? [h("span.dot", null, " · "), part] : [part]));

/** A number with six digits; texts and bools as in the document. */
function value(each) {
  if (typeof each !== "number") return typeof each === "string" ? each : JSON.stringify(each ?? null);
  if (Number.isInteger(each) && Math.abs(each) < 1e15) return String(each);
  return Math.abs(each) < 1e-3 ? each.toExponential(5).replace(/\.?0+e/, "e") : String(Number(each.toPrecision(6)));
}

/** A duration in at most two units: 12s, 1m20s, 2h05m, 3d04h. */
function short(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 1) return `${Math.floor(seconds * 10) / 10}s`;
  const pad = number => String(number).padStart(2, "0");
  const [minutes, hours, days] = [60, 3600, 86400].map(unit => Math.floor(seconds / unit));
  if (days) return `${days}d${pad(hours % 24)}h`;
  if (hours) return `${hours}h${pad(minutes % 60)}m`;
  return minutes ? `${minutes}m${pad(Math.floor(seconds) % 60)}s` : `${Math.floor(seconds)}s`;
}

const when = iso => (iso ? Date.parse(iso) / 1000 : NaN);

function between(from, to) {
  const seconds = when(to) - when(from);
  return Number.isFinite(seconds) ? Math.max(0, seconds) : null;
}

/** "2026-11-26 02:00:00 UTC"; without the day if it is that of `day`. */
function moment(iso, day) {
  const time = new Date(iso ?? NaN);
  if (Number.isNaN(time.getTime())) return h("time", null, String(iso ?? ""));
  const text = time.toISOString();
  const same = day && text.slice(0, 10) === String(day).slice(0, 10);
  return h("time", { datetime: text, title: time.toLocaleString() }, `${same ? "" : `${text.slice(0, 10)} `}${text.slice(11, 19)} UTC`);
}

const UNITS = { m: 1e-3, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15, Ki: 2 ** 10, Mi: 2 ** 20, Gi: 2 ** 30, Ti: 2 ** 40, Pi: 2 ** 50 };

/** A quantity of Kubernetes as a number. */
function quantity(text) {
  const found = /^([0-9.]+(?:e[0-9]+)?)(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$/.exec(String(text));
  return found ? Number(found[1]) * (UNITS[found[2]] || 1) : NaN;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (count >= 1024 && index < units.length - 1) { count /= 1024; index += 1; }
  return `${count >= 100 || Number.isInteger(count) ? Math.round(count) : count.toFixed(1)} ${units[index]}`;
}

let announced = "";

/** Text for screen readers. */
function announce(text) {
  announced = text;
  setTimeout(() => {
    const region = document.getElementById("announcement");
    if (announced === text && region.textContent !== text) region.textContent = text;
  }, 150);
}

// ---------------------------------------------------------------- sections

/** A section with a heading, controls that stay, and a body that is rendered again. Hidden while it has no content. */
class Section {
  constructor(id, title) {
    this.title = title;
    this.controls = h("div.controls", { hidden: true });
    this.body = h("div.body");
    this.heading = h("h2", { id: `${id}-title`, tabindex: "-1" }, title);
    this.element = h("section.panel", { id, "aria-labelledby": `${id}-title`, hidden: true },
      h("div.bar", null, this.heading, this.controls), this.body);
  }

  control(...elements) {
    this.controls.hidden = false;
    this.controls.append(...elements);
  }

  show(content, visible = true) {
    this.element.hidden = !visible;
    render(this.body, visible ? content : []);
  }
}

/** A table in a box that scrolls, reachable with the keyboard. */
function table(label, head, rows, kind = "") {
  return h(`div.scroll${kind && `.${kind}`}`, { tabindex: "0", role: "group", "aria-label": label },
    h("table", null,
      head && h("thead", null, h("tr", null, head.map(each => {
        const [text, tone] = [each].flat();
        return h(tone ? `th.${tone}` : "th", { scope: "col" }, text);
      }))),
      h("tbody", null, rows)));
}

const row = (name, ...cells) =>
  h("tr", null, h("th", { scope: "row" }, name), cells.map(each => h("td.wide", null, each)));

const pairs = (label, entries) => table(label, null, entries.map(([name, ...cells]) => row(name, ...cells)), "pairs");

function button(text, action, attributes) {
  return h("button", { type: "button", click: action, ...attributes }, text);
}

function checkbox(text, checked, change) {
  const input = h("input", { type: "checkbox", change: event => change(event.target.checked) });
  input.checked = checked;
  return h("label.check", null, input, text);
}

function radios(legend, name, options, chosen, change) {
  return h("fieldset.segments", null, h("legend.hidden", null, legend), Object.entries(options).map(([key, text]) => {
    const input = h("input", { type: "radio", name, value: key, change: () => change(key) });
    input.checked = key === chosen;
    return h("label", null, input, h("span", null, text));
  }));
}

function search(label, change) {
  return h("input.search", { type: "search", placeholder: label, "aria-label": label, autocomplete: "off", spellcheck: "false",
    input: event => change(event.target.value.trim().toLowerCase()) });
}

// ---------------------------------------------------------------- curves

const STEP_INCREMENTS = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map(each => each * 10 ** power)).flat();
const TIME_INCREMENTS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  ...[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map(days => days * 86400)];
const MODES = { step: "Steps", time: "Time" };

function compactNumber(each) {
  const size = Math.abs(each);
  if (size >= 1e15 || (size && size < 1e-3)) return each.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  for (const [limit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${Number((each / (sign === "k" ? 1e3 : limit)).toPrecision(4))}${sign}`;
  }
  return String(Number(each.toPrecision(6)));
}

/** Whether a number has one digit: uPlot also labels the ends of a logarithmic scale, which are arbitrary numbers. */
const isRound = each => /^\d(\.0*)?e/.test(each.toExponential(6));

/** Hours, minutes and seconds: 2:12:05. */
function precise(seconds) {
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  return parts.map((each, index) => (index ? String(each).padStart(2, "0") : each)).join(":");
}

/** The parts of a history in which steps grow: a rank that is restarted begins at an earlier step. */
function segmentsOf(points) {
  const segments = [];
  let last = Infinity;
  for (const point of points) {
    if (point[0] == null || point[2] == null) continue;
    if (point[0] < last) segments.push([]);
    segments.at(-1).push(point);
    last = point[0];
  }
  return segments;
}

/** Lines over steps as [xs, ys]. Where steps of several attempts overlap, the latest attempt wins. */
function overSteps(histories) {
  const covered = [];
  const inside = step => covered.some(([from, to]) => step >= from && step <= to);
  const made = histories.map(() => []);
  for (let index = histories.length - 1; index >= 0; index -= 1) {
    for (const segment of segmentsOf(histories[index]).reverse()) {
      const kept = segment.map(([step, , each]) => [step, inside(step) ? null : each]);
      covered.push([segment[0][0], segment.at(-1)[0]]);
      made[index].push(...kept);
    }
  }
  return made.map(points => {
    points.sort((a, b) => a[0] - b[0]);
    const [xs, ys] = [[], []];
    for (const [x, y] of points) {
      if (xs.length && xs.at(-1) === x) ys[ys.length - 1] = y ?? ys.at(-1);
      // One gap is enough where a later attempt covers many points.
      else if (y !== null || (ys.length && ys.at(-1) !== null)) { xs.push(x); ys.push(y); }
    }
    return [xs, ys];
  });
}

function overTime(history, zero) {
  const [xs, ys] = [[], []];
  const points = history.filter(point => point[2] != null).map(point => [Math.max(0, point[1] - zero), point[2]]);
  points.sort((a, b) => a[0] - b[0]);
  for (const [x, y] of points) {
    if (xs.length && xs.at(-1) === x) ys[ys.length - 1] = y;
    else { xs.push(x); ys.push(y); }
  }
  return [xs, ys];
}

const pointsOf = (line, metric) => own(line.history, metric) || [];

const firstTime = histories =>
  histories.flatMap(Object.values).reduce((least, points) => (points.length ? Math.min(least, points[0][1]) : least), Infinity);

/** The lines of a training's charts: attempts, which belong together, and what they are compared with. */
function linesOfTraining(training) {
  const earlier = training.attempts.slice(0, -1);
  const attempts = [...earlier.map(each => ({ attempt: each.attempt, history: each.history })),
    { attempt: training.attempt, history: training.history }];
  const zero = firstTime(attempts.map(each => each.history));
  const present = attempts.filter((each, index) => index === attempts.length - 1 || Object.keys(each.history).length);
  const lines = present.map((each, index) => {
    const latest = index === present.length - 1;
    return { id: `attempt-${each.attempt}`, family: "attempts", label: present.length > 1 ? `attempt ${each.attempt}` : "this training",
      history: each.history, zero, color: latest ? "--line-0" : "--line-earlier", dash: null, main: latest };
  });
  training.compare.forEach((each, index) => lines.push({
    id: `compare-${index}`, family: `compare-${index}`, compared: true, label: each.label, name: each.name, href: each.href,
    history: each.history, zero: firstTime([each.history]), color: `--line-${1 + (index % 7)}`, dash: [6, 4], main: false,
  }));
  return lines;
}

function linesOfWorkflow(workflow) {
  return workflow.trainings.map((each, index) => {
    const attempts = [...each.attempts.slice(0, -1).map(one => one.history), each.history];
    const history = Object.create(null);
    for (const one of attempts) {
      for (const [metric, points] of Object.entries(one)) history[metric] = [...(history[metric] || []), ...points];
    }
    return { id: each.uid || `${index}`, family: `training-${index}`, label: each.task || each.name, history, href: "",
      zero: firstTime([history]), color: `--line-${index % 8}`, dash: index < 8 ? null : [2 + 3 * Math.floor(index / 8), 3], main: false };
  });
}

class Chart {
  constructor(curves, metric) {
    this.curves = curves;
    this.metric = metric;
    this.visible = false;
    this.plot = null;
    this.lines = [];
    this.value = h("span.value");
    this.tip = h("div.tip", { hidden: true, "aria-hidden": "true" });
    this.area = h("div.plot", { tabindex: "0", role: "img", "aria-describedby": "curves-keys",
      keydown: event => this.key(event), blur: () => this.leave(), pointerenter: () => { curves.hot = this; } });
    this.frame = h("div.frame", null, this.area, this.tip);
    this.values = h("div.values", { hidden: true });
    this.tableButton = button(icon("table"), () => this.toggleTable(), { "aria-pressed": "false", class: "small" });
    this.enlargeButton = button(icon("enlarge"), () => this.toggleSize(), { "aria-pressed": "false", class: "small" });
    for (const [each, text] of [[this.tableButton, "Table of values"], [this.enlargeButton, "Enlarge the chart"]]) {
      each.title = text;
      each.setAttribute("aria-label", `${text}: ${cut(metric)}`);
    }
    this.element = h("figure.chart", null,
      h("figcaption", null, h("span.metric", null, named(metric)), this.value, this.enlargeButton, this.tableButton),
      this.frame, this.values);
  }

  /** The lines that are shown and have values. */
  shown() {
    return this.curves.lines.filter(line => !this.curves.off.has(line.id) && pointsOf(line, this.metric).length);
  }

  /** Align the values of the lines. */
  prepare() {
    const { mode, log } = this.curves;
    this.lines = this.shown();
    const attempts = this.lines.filter(line => line.family === "attempts");
    const joinedAttempts = mode === "step" ? overSteps(attempts.map(line => pointsOf(line, this.metric))) : [];
    const tables = this.lines.map(line => {
      const points = pointsOf(line, this.metric);
      if (mode === "time") return overTime(points, line.zero);
      return line.family === "attempts" ? joinedAttempts[attempts.indexOf(line)] : overSteps([points])[0];
    });
    this.log = log && tables.some(([, ys]) => ys.some(y => y > 0));
    if (this.log) tables.forEach(([, ys]) => ys.forEach((y, index) => { if (y <= 0) ys[index] = null; }));
    this.data = tables.length ? uPlot.join(tables) : [[]];
  }

  /** What decides whether the chart has to be drawn again. */
  signature() {
    const { mode, log, lines, off } = this.curves;
    return JSON.stringify([mode, log, lines.map(line => {
      const points = pointsOf(line, this.metric);
      return [line.id, line.color, off.has(line.id), points.length, points[0], points.at(-1)];
    })]);
  }

  update() {
    const signature = this.signature();
    if (signature === this.drawn) return;
    this.drawn = signature;
    this.stale = true;
    this.summarize();
    if (this.visible || this.plot || !this.values.hidden) this.refresh();
  }

  /** Draw what has changed. A chart that is not in view waits until it is. */
  refresh() {
    if (!this.stale) return;
    this.stale = false;
    this.prepare();
    if (!this.values.hidden) this.fillTable();
    const shape = JSON.stringify([this.lines.map(line => [line.id, line.color]), this.log, this.curves.mode]);
    if (this.plot && shape === this.shape) {
      this.plot.setData(this.data, false);
      this.zoom();
    } else {
      this.draw();
    }
    this.shape = shape;
  }

  /** Index of the line whose value stands beside the name; -1 where lines of equal rank are compared. */
  main() {
    return this.lines.findIndex(line => line.main);
  }

  /** The latest value of this training: of its latest attempt with values. */
  latest() {
    const own = this.shown().filter(line => line.family === "attempts");
    const last = own.length ? pointsOf(own.at(-1), this.metric).findLast(point => point[2] != null) : null;
    return last ? value(last[2]) : "";
  }

  summarize() {
    const lines = this.shown();
    let [count, least, most] = [0, Infinity, -Infinity];
    for (const line of lines.filter(each => !each.compared)) {
      for (const [, , each] of pointsOf(line, this.metric)) {
        if (each == null) continue;
        count += 1;
        least = Math.min(least, each);
        most = Math.max(most, each);
      }
    }
    const last = this.latest();
    this.value.textContent = last;
    const facts = [last && `last ${last}`, count && `minimum ${value(least)}, maximum ${value(most)}`, plural(count, "value")];
    this.area.setAttribute("aria-label", `Chart of ${cut(this.metric)}: ${facts.filter(Boolean).join(", ")}`);
  }

  draw() {
    this.plot?.destroy();
    this.plot = null;
    this.area.replaceChildren();
    if (!this.data[0].length) {
      this.area.append(h("p.dim.none", null, this.curves.mode === "step" ? "No values with steps" : "No values"));
      return;
    }
    const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const axis = { stroke: color("--dim"), font, grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, gap: 4 };
    const time = this.curves.mode === "time";
    this.plot = new uPlot({
      ...this.size(),
      padding: [10, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, points: { size: 7 } },
      scales: {
        x: { time: false, range: (_, from, to) => this.range(from, to) },
        y: { distr: this.log ? 3 : 1, range: (_, from, to) => this.heights(from, to) },
      },
      axes: [
        { ...axis, size: 26, space: 64, incrs: time ? TIME_INCREMENTS : STEP_INCREMENTS,
          values: (_, splits) => splits.map(each => (time ? short(each).replace(/(\D)00\D$/, "$1") : compactNumber(each))) },
        { ...axis, space: 28, size: (plot, values) => widest(plot, values, font),
          values: (_, splits) => splits.map(each => (each == null || (this.log && !isRound(each)) ? "" : compactNumber(each))) },
      ],
      series: [{}, ...this.lines.map((line, index) => ({
        label: line.label, stroke: color(line.color), dash: line.dash || undefined, width: line.main ? 2 : 1.5,
        points: { show: this.data[index + 1].reduce((count, each) => count + (each != null), 0) <= 24, size: 5 },
      }))],
      hooks: {
        setSelect: [plot => {
          if (plot.select.width < 4) return;
          this.curves.setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        }],
        setCursor: [plot => this.moved(plot)],
      },
    }, this.data, this.area);
    this.plot.over.addEventListener("dblclick", () => this.curves.setZoom(null));
    if (!performance.getEntriesByName("trainjob-chart").length) performance.mark("trainjob-chart");
  }

  size() {
    // On paper: two charts side by side on A4 and Letter, whatever the width of the window.
    if (this.curves.printing) return { width: this.curves.charts.size === 1 ? 640 : 305, height: 150 };
    const width = Math.floor(this.frame.clientWidth) || 320;
    return { width, height: this.element.classList.contains("large") ? 360 : 170 };
  }

  resize() {
    const size = this.size();
    if (this.plot && (size.width !== this.plot.width || size.height !== this.plot.height)) this.plot.setSize(size);
  }

  full() {
    const xs = this.data[0];
    const [from, to] = [xs[0] ?? 0, xs.at(-1) ?? 1];
    return from === to ? [from - 1, to + 1] : [from, to];
  }

  range() {
    return this.curves.zoomed || this.full();
  }

  heights(from, to) {
    if (from == null || to == null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      const space = from === to ? 0.3 : 0.05 * Math.log10(to / from);
      return [from / 10 ** space, to * 10 ** space];
    }
    const space = from === to ? Math.abs(from) * 0.1 || 1 : (to - from) * 0.06;
    // A scale that begins just below zero would suggest negative values.
    return [from >= 0 && from - space < 0 ? 0 : from - space, to + space];
  }

  zoom() {
    const [min, max] = this.range();
    this.plot?.setScale("x", { min, max });
  }

  // The cursor: of one chart, which the others follow.

  moved(plot) {
    if (this.curves.hot !== this || this.curves.following) return;
    const { left, idx } = plot.cursor;
    if (left == null || left < 0 || idx == null) return this.curves.hover(null);
    this.curves.hover(this.data[0][idx], this);
    this.showTip(plot, idx);
  }

  at(line, idx) {
    const ys = this.data[line + 1];
    if (ys[idx] != null) return ys[idx];
    // Lines have values at different places: that of the nearest place within the line.
    const xs = this.data[0];
    let [before, after] = [idx, idx];
    while (before >= 0 && ys[before] == null) before -= 1;
    while (after < ys.length && ys[after] == null) after += 1;
    if (before < 0 || after >= ys.length) return null;
    return ys[xs[idx] - xs[before] <= xs[after] - xs[idx] ? before : after];
  }

  place(x) {
    return this.curves.mode === "time" ? `${short(x)} after the first value` : `step ${x.toLocaleString("en-US")}`;
  }

  showTip(plot, idx) {
    const rows = this.lines.map((line, index) => [line, this.at(index, idx)]).filter(([, each]) => each != null);
    render(this.tip, h("div.dim", null, this.place(this.data[0][idx])),
      rows.map(([line, each]) => h("div.entry", null, swatch(line), h("span.name", null, named(line.label)), h("b", null, value(each)))));
    this.tip.hidden = false;
    const [left, width] = [plot.bbox.left / devicePixelRatio + plot.cursor.left, this.frame.clientWidth];
    const beside = left + 12 + this.tip.offsetWidth > width ? Math.max(0, left - 12 - this.tip.offsetWidth) : left + 12;
    this.tip.style.setProperty("left", `${beside}px`);
    const text = rows.map(([line, each]) => (rows.length > 1 ? `${cut(line.label)} ${value(each)}` : value(each))).join(", ");
    return `${cut(this.metric)}, ${this.place(this.data[0][idx])}: ${text || "no value"}`;
  }

  follow(x) {
    if (!this.plot) return;
    if (x === null) {
      this.tip.hidden = true;
      this.plot.setCursor({ left: -10, top: -10 }, false);
      this.value.textContent = this.latest();
      return;
    }
    const outside = !(x >= this.data[0][0] && x <= this.data[0].at(-1));
    if (this.curves.hot !== this) {
      this.tip.hidden = true;
      this.plot.setCursor({ left: outside ? -10 : this.plot.valToPos(x, "x"), top: 10 }, false);
    }
    const main = this.main();
    if (main < 0) return;
    const each = outside ? null : this.at(main, this.plot.valToIdx(x));
    this.value.textContent = each === null ? "–" : value(each);
  }

  leave() {
    if (this.curves.hot === this) this.curves.hover(null);
  }

  key(event) {
    const xs = this.data?.[0] || [];
    if (!this.plot || !xs.length || event.ctrlKey || event.altKey || event.metaKey) return;
    const far = Math.max(1, Math.round(xs.length / 10));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -far, PageUp: far, Home: -xs.length, End: xs.length };
    const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
    const current = this.curves.hot === this && this.curves.x !== null ? this.plot.valToIdx(this.curves.x) : null;
    if (event.key === "Escape") this.leave();
    else if (event.key === "0") this.curves.setZoom(null);
    else if (event.key in zooms) {
      const [from, to] = this.range();
      const [middle, half] = [current === null ? (from + to) / 2 : xs[current], ((to - from) * zooms[event.key]) / 2];
      const [least, most] = this.full();
      const range = [Math.max(least, middle - half), Math.min(most, middle + half)];
      this.curves.setZoom(range[0] <= least && range[1] >= most ? null : range);
    } else if (event.key in moves) {
      const move = moves[event.key];
      const start = move < 0 ? xs.length : -1;
      this.point(Math.min(xs.length - 1, Math.max(0, (current ?? start) + move)));
    } else return;
    event.preventDefault();
  }

  point(index) {
    this.curves.hot = this;
    const x = this.data[0][index];
    const [from, to] = this.range();
    if (x < from || x > to) this.curves.setZoom([x - (to - from) / 2, x + (to - from) / 2]);
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 10 }, false);
    this.curves.hover(x, this);
    announce(this.showTip(this.plot, index));
  }

  toggleTable() {
    this.values.hidden = !this.values.hidden;
    this.tableButton.setAttribute("aria-pressed", String(!this.values.hidden));
    if (this.values.hidden) this.values.replaceChildren();
    else this.fillTable();
  }

  fillTable() {
    this.refresh();
    const xs = this.data[0];
    const rows = [];
    for (let index = xs.length - 1; index >= 0 && rows.length < TABLE_ROWS; index -= 1) {
      const cells = this.lines.map((_, line) => this.data[line + 1][index]);
      if (cells.every(each => each == null)) continue;
      const place = this.curves.mode === "time" ? precise(xs[index]) : xs[index].toLocaleString("en-US");
      rows.push(h("tr", null, h("th", { scope: "row" }, place), cells.map(each => h("td.number", null, each == null ? "" : value(each)))));
    }
    render(this.values,
      table(`Values of ${cut(this.metric)}`, [this.curves.mode === "time" ? "time" : "step", ...this.lines.map(line => [named(line.label), "number"])], rows),
      h("p.dim", null, xs.length > rows.length ? `The latest ${plural(rows.length, "row")} of ${xs.length.toLocaleString("en-US")}.` : "Latest first."));
  }

  toggleSize() {
    const large = this.element.classList.toggle("large");
    this.enlargeButton.setAttribute("aria-pressed", String(large));
    this.resize();
  }

  destroy() {
    this.plot?.destroy();
    this.curves.observer.unobserve(this.element);
    this.curves.sizes.unobserve(this.frame);
    this.element.remove();
  }
}

function widest(plot, values, font) {
  plot.ctx.save();
  plot.ctx.font = font;
  const width = Math.max(0, ...(values || []).map(each => plot.ctx.measureText(each).width));
  plot.ctx.restore();
  return Math.max(28, Math.ceil(width) + 12);
}

function swatch(line) {
  return h(`span.swatch${line.dash ? ".dashed" : ""}`, { style: { color: `var(${line.color})` } });
}

class Curves extends Section {
  constructor() {
    super("curves", "Curves");
    Object.assign(this, { mode: null, log: false, off: new Set(), zoomed: null, charts: new Map(), lines: [], hot: null, x: null, query: "", following: false, printing: false });
    this.modes = h("div");
    this.logBox = checkbox("Log scale", false, checked => { this.log = checked; this.draw(); });
    this.compareBox = checkbox("Comparison", true, checked => this.compare(checked));
    this.reset = button("Reset zoom", () => this.setZoom(null), { disabled: true, title: "Also: double-click a chart, or the key 0" });
    this.filter = search("Filter metrics", query => { this.query = query; this.choose(); });
    this.control(this.filter, this.modes, this.logBox, this.compareBox, this.reset);
    this.legend = h("div.legend", { role: "group", "aria-label": "Lines" });
    this.none = h("p.dim", { hidden: true, role: "status" });
    this.grid = h("div.charts");
    this.body.append(this.legend, this.none, this.grid,
      h("p.hidden", { id: "curves-keys" }, "Left and right arrow keys move the cursor, plus and minus zoom, 0 resets the zoom."));
    this.observer = new IntersectionObserver(entries => entries.forEach(entry => {
      const chart = [...this.charts.values()].find(each => each.element === entry.target);
      if (!chart) return;
      chart.visible = entry.isIntersecting;
      if (chart.visible) chart.refresh();
    }), { rootMargin: "200px" });
    this.sizes = new ResizeObserver(entries => entries.forEach(entry => {
      [...this.charts.values()].find(each => each.frame === entry.target)?.resize();
    }));
    this.grid.addEventListener("pointerleave", () => this.hover(null));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    addEventListener("beforeprint", () => this.print(true));
    addEventListener("afterprint", () => this.print(false));
  }

  update(lines) {
    this.lines = lines;
    const metrics = [...new Set(lines.flatMap(line => Object.keys(line.history).filter(name => line.history[name].length)))];
    this.element.hidden = !metrics.length;
    const stepped = lines.some(line => Object.values(line.history).some(points => points.some(point => point[0] != null)));
    if (this.mode === null && metrics.length) this.mode = stepped ? "step" : "time";
    if (!stepped && this.mode === "step") this.mode = "time";
    if (this.stepped !== stepped) {
      this.stepped = stepped;
      render(this.modes);
      if (stepped) this.modes.append(radios("Horizontal axis", "axis", MODES, this.mode, mode => { this.mode = mode; this.setZoom(null); this.draw(); }));
    }
    for (const [metric, chart] of this.charts) {
      if (!metrics.includes(metric)) { chart.destroy(); this.charts.delete(metric); }
    }
    for (const metric of metrics) {
      if (this.charts.has(metric)) continue;
      const chart = new Chart(this, metric);
      this.charts.set(metric, chart);
      this.grid.append(chart.element);
      this.observer.observe(chart.element);
      this.sizes.observe(chart.frame);
    }
    this.compareBox.hidden = !lines.some(line => line.compared);
    this.filter.hidden = metrics.length <= FILTER_FROM;
    this.grid.classList.toggle("single", metrics.length === 1);
    this.grid.classList.toggle("pairwise", metrics.length === 2 || metrics.length === 4);
    this.showLegend();
    this.choose();
    this.draw();
  }

  showLegend() {
    const lines = this.lines.filter(line => Object.values(line.history).some(points => points.length));
    this.legend.hidden = lines.length < 2;
    const shown = JSON.stringify(lines.map(line => [line.id, line.label, line.name, line.href, this.off.has(line.id)]));
    if (shown === this.legendShown) return;
    this.legendShown = shown;
    const focused = [...this.legend.children].findIndex(each => each.contains(document.activeElement));
    this.legend.replaceChildren(...lines.map(line => h("span.line", null,
      button([swatch(line), named(line.label)], () => this.toggle([line], !this.off.has(line.id)),
        { "aria-pressed": String(!this.off.has(line.id)), title: "Show or hide the line" }),
      line.name && link(line.href, named(line.name)))));
    if (focused >= 0) this.legend.children[focused]?.querySelector("button")?.focus();
  }

  toggle(lines, hide) {
    for (const line of lines) {
      if (hide) this.off.add(line.id);
      else this.off.delete(line.id);
    }
    const compared = this.lines.filter(line => line.compared);
    this.compareBox.querySelector("input").checked = compared.some(line => !this.off.has(line.id));
    this.showLegend();
    this.draw();
  }

  compare(checked) {
    this.toggle(this.lines.filter(line => line.compared), !checked);
  }

  choose() {
    let found = 0;
    for (const [metric, chart] of this.charts) {
      const shown = metric.toLowerCase().includes(this.query);
      chart.element.hidden = !shown;
      found += shown;
    }
    this.none.hidden = found > 0;
    this.none.textContent = found ? "" : "No metric has this name.";
  }

  draw() {
    for (const chart of this.charts.values()) chart.update();
  }

  redraw() {
    for (const chart of this.charts.values()) if (chart.plot) chart.draw();
  }

  setZoom(range) {
    this.zoomed = range;
    this.reset.disabled = !range;
    for (const chart of this.charts.values()) chart.zoom();
  }

  hover(x) {
    if (this.following || (x === null && this.x === null)) return;
    this.following = true;
    this.x = x;
    for (const chart of this.charts.values()) if (chart.visible) chart.follow(x);
    this.following = false;
  }

  print(starts) {
    this.hover(null);
    this.printing = starts;
    document.documentElement.classList.toggle("print", starts);
    for (const chart of this.charts.values()) {
      if (chart.element.hidden) continue;
      if (starts) chart.refresh();
      if (chart.plot) chart.draw();
    }
  }
}

// ---------------------------------------------------------------- log

class Log extends Section {
  constructor(chosen, live) {
    super("log", "Log");
    Object.assign(this, { ranks: new Map(), names: [], rank: "", query: "", follow: true, chosen, shown: [] });
    this.select = h("select", { "aria-label": "Rank", change: () => { this.rank = this.select.value; this.fill(true); this.chosen(this.rank); } });
    this.box = h("div.log", { tabindex: "0", role: "log", "aria-live": "off", "aria-label": "Log", scroll: () => this.scrolled() });
    this.followBox = checkbox("Follow", true, checked => { this.follow = checked; this.stick(); });
    this.count = h("p.dim.count", { role: "status" });
    this.followBox.hidden = !live;
    this.control(search("Search the log", query => { this.query = query; this.fill(true); }), this.select, this.followBox);
    this.body.append(this.box, this.count);
    // Where lines break changes with the width.
    new ResizeObserver(() => this.stick()).observe(this.box);
  }

  update(lines, ranks) {
    const fresh = new Map();
    for (const line of lines) {
      if (!fresh.has(line.rank)) fresh.set(line.rank, []);
      fresh.get(line.rank).push(line);
    }
    for (const [rank, found] of fresh) this.ranks.set(rank, merged(this.ranks.get(rank) || [], found).slice(-LOG_LINES));
    const names = [...new Set([...ranks, ...this.ranks.keys()])];
    if (JSON.stringify(names) !== JSON.stringify(this.names)) {
      this.names = names;
      render(this.select, h("option", { value: "" }, "All ranks"), names.map(name => h("option", { value: name }, cut(name) || "(no rank)")));
      this.select.value = this.rank;
    }
    this.select.hidden = names.length < 2;
    const wasHidden = this.element.hidden;
    this.element.hidden = !this.ranks.size;
    this.fill(false);
    if (wasHidden) this.stick();
  }

  fill(anew) {
    // The event of a scroll comes one frame later.
    if (this.shown.length) this.scrolled();
    let lines = this.rank ? this.ranks.get(this.rank) || [] : [...this.ranks.values()].flat();
    // Stable: lines of one rank keep their order, also without a time.
    if (!this.rank && this.ranks.size > 1) lines = lines.map(line => [when(line.time) || 0, line]).sort((a, b) => a[0] - b[0]).map(each => each[1]);
    const all = lines.length;
    if (this.query) lines = lines.filter(line => String(line.text).toLowerCase().includes(this.query));
    const found = lines.length;
    lines = lines.slice(-SHOWN_LINES);
    const top = this.box.scrollTop;
    let dropped = 0;
    const start = anew || !this.shown.length ? -1 : lines.indexOf(this.shown.at(-1));
    const first = this.shown.indexOf(lines[0]);
    if (start >= 0 && first >= 0 && this.shown.length - first === start + 1) {
      const before = this.box.scrollHeight;
      for (let index = 0; index < first; index += 1) this.box.firstChild.remove();
      dropped = before - this.box.scrollHeight;
      this.box.append(...lines.slice(start + 1).map(line => this.line(line)));
    } else if (lines.length !== this.shown.length || lines.some((line, index) => line !== this.shown[index])) {
      this.box.replaceChildren(...lines.map(line => this.line(line)));
    }
    this.shown = lines;
    if (this.follow) this.stick();
    else if (dropped) this.box.scrollTop = Math.max(0, top - dropped);
    const which = this.query ? `${plural(found, "line")} of ${all.toLocaleString("en-US")} with this text` : all === 1 ? "1 line" : `The last ${plural(all, "line")}`;
    const text = lines.length < found ? `${which}; the last ${lines.length.toLocaleString("en-US")} are shown` : which;
    if (this.count.textContent !== text) this.count.textContent = text;
  }

  line(line) {
    const text = plain(line.text);
    const tone = /\b(error|exception|traceback|fatal)\b|error:/i.test(text) ? ".bad" : "";
    const time = line.time ? new Date(line.time) : null;
    return h(`div.row${tone}`, null,
      h("span.time", null, time && !Number.isNaN(time.getTime()) ? `${time.toISOString().slice(11, 19)} ` : ""),
      this.ranks.size > 1 && h("span.rank", null, named(line.rank), " "),
      h("bdi.text", null, this.query ? marked(text, this.query) : text));
  }

  scrolled() {
    const end = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 24;
    if (end !== this.follow) { this.follow = end; this.followBox.querySelector("input").checked = end; }
  }

  stick() {
    if (this.follow) this.box.scrollTop = this.box.scrollHeight;
  }
}

function marked(text, query) {
  const parts = [];
  const lower = text.toLowerCase();
  let position = 0;
  // Lower case can be longer ("İ"): then positions differ, and nothing is marked.
  if (lower.length !== text.length) return [text];
  for (let found = lower.indexOf(query); found >= 0; found = lower.indexOf(query, position)) {
    parts.push(text.slice(position, found), h("mark", null, text.slice(found, found + query.length)));
    position = found + query.length;
  }
  return [...parts, text.slice(position)];
}

/** Lines known before, and new ones: where they overlap, the known line objects stay. */
function merged(old, fresh) {
  const same = (a, b) => a.time === b.time && a.text === b.text;
  const runs = (from, offset) => {
    for (let index = 0; from + index < old.length && offset + index < fresh.length; index += 1) {
      if (!same(old[from + index], fresh[offset + index])) return false;
    }
    return true;
  };
  for (let index = 0; fresh.length && index < old.length; index += 1) {
    if (same(old[index], fresh[0]) && runs(index, 0)) return [...old, ...fresh.slice(old.length - index)];
  }
  for (let index = 0; old.length && index < fresh.length; index += 1) {
    if (same(fresh[index], old[0]) && runs(0, index)) return [...fresh.slice(0, index), ...old, ...fresh.slice(index + old.length)];
  }
  return fresh;
}

// ---------------------------------------------------------------- ranks

function toneOf(rank) {
  if (rank.culprit) return "bad";
  if (rank.bad) return "warn";
  return own({ Running: "info", Completed: "good" }, rank.state) || "quiet";
}

class Ranks extends Section {
  constructor() {
    super("ranks", "Ranks");
    this.all = false;
    this.more = button("", () => { this.all = !this.all; this.fill(); }, { hidden: true });
    this.inner = h("div");
    this.body.append(this.inner, this.more);
  }

  update(ranks) {
    this.ranks = ranks;
    this.element.hidden = !ranks.length;
    this.fill();
  }

  fill() {
    const { ranks } = this;
    const counts = new Map();
    for (const rank of ranks) counts.set(rank.state || "unknown", (counts.get(rank.state || "unknown") || 0) + 1);
    const summary = [...counts].sort((a, b) => b[1] - a[1]).map(([state, count]) => `${count.toLocaleString("en-US")} ${state}`);
    const speeds = ranks.map(rank => rank.step_seconds).filter(each => each > 0).sort((a, b) => a - b);
    const typical = speeds.length > 2 ? speeds[Math.floor(speeds.length / 2)] : null;
    const important = rank => (rank.culprit ? 0 : rank.bad ? 1 : 2);
    const sorted = ranks.length > 16 ? [...ranks].sort((a, b) => important(a) - important(b)) : ranks;
    const shown = this.all ? sorted : sorted.slice(0, SHOWN_RANKS);
    const has = name => ranks.some(rank => rank[name] != null && rank[name] !== "" && rank[name] !== 0);
    const columns = [
      ["state", "state", rank => [h(`span.state.${toneOf(rank)}`, null, named(rank.state || "unknown")), rank.culprit && h("span.tag.bad", null, icon("bad"), "root cause")]],
      ["exit code", "exit_code", rank => rank.exit_code ?? "", "number"],
      ["restarts", "restarts", rank => rank.restarts || "", "number"],
      ["step", "step", rank => rank.step?.toLocaleString("en-US") ?? "", "number"],
      ["time per step", "step_seconds", rank => (rank.step_seconds == null ? "" : [
        typical && rank.step_seconds > 1.5 * typical && h("span.tag.warn", null, `${value(Number((rank.step_seconds / typical).toPrecision(2)))}× the median`), " ", seconds(rank.step_seconds)]), "number"],
      ["started (UTC)", "started", rank => clock(rank.started)],
      ["ended", "finished", rank => clock(rank.finished)],
      ["node", "node", rank => named(rank.node)],
      ["pod", "pod", rank => h("span.dim", null, named(rank.pod))],
    ].filter(([name, key]) => name === "state" || name === "exit code" || has(key));
    const strip = ranks.length > 8 && h(`div.strip${ranks.length > 256 ? ".dense" : ""}`, { "aria-hidden": "true" }, ranks.slice(0, 2048).map(rank =>
      h(`i.${toneOf(rank)}${rank.culprit ? ".culprit" : ""}`, { title: `${cut(rank.rank)}: ${cut(rank.state)}${rank.exit_code == null ? "" : `, exit code ${rank.exit_code}`}` })));
    render(this.inner, h("p.dim", null, `${plural(ranks.length, "rank")}: `, bdi(summary.slice(0, 8).map(cut).join(", "))), strip,
      table("Ranks", ["rank", ...columns.map(([name, , , kind]) => [name, kind])], shown.map(rank =>
        h(`tr${rank.culprit ? ".culprit" : ""}`, null, h("th", { scope: "row" }, named(rank.rank)),
          columns.map(([, , cell, kind]) => h(kind ? `td.${kind}` : "td", null, cell(rank))))), shown.length > 16 ? "ranks.tall" : "ranks"));
    this.more.hidden = ranks.length <= SHOWN_RANKS;
    this.more.textContent = this.all ? `Show ${SHOWN_RANKS} ranks` : `Show all ${plural(ranks.length, "rank")}`;
  }
}

const seconds = each => (each < 1 ? `${value(Number((each * 1000).toPrecision(3)))} ms` : `${value(Number(each.toPrecision(3)))} s`);

function clock(iso) {
  const time = new Date(iso ?? NaN);
  return Number.isNaN(time.getTime()) ? "" : h("time", { datetime: time.toISOString(), title: time.toISOString() }, time.toISOString().slice(11, 19));
}

// ---------------------------------------------------------------- other parts of a training

function head(training, state) {
  const { taken, phase } = training;
  const since = between(training.since, taken);
  const nodes = training.spec.nodes || "";
  const message = [training.reason, training.message].filter(Boolean).join(": ");
  const repeated = [training.diagnosis?.summary, training.blocker?.message].some(text =>
    text && training.message && (text.includes(training.message) || training.message.includes(text)));
  const ended = TERMINAL.has(phase);
  const facts = [
    ["age", training.seconds.age], ["queued for", training.seconds.queued], [ended ? "ran for" : "active for", training.seconds.active],
  ].filter(([, each]) => each != null).map(([name, each]) => [name, short(each)]);
  if (training.step != null) facts.push(["step", training.step.toLocaleString("en-US")]);
  const running = training.ranks.filter(rank => rank.state === "Running").length;
  if (training.ranks.length && !ended) facts.push(["ranks running", `${running.toLocaleString("en-US")} of ${training.ranks.length.toLocaleString("en-US")}`]);
  const restarts = training.ranks.reduce((sum, rank) => sum + (rank.restarts || 0), 0);
  if (restarts) facts.push(["restarts of ranks", restarts.toLocaleString("en-US")]);
  return [
    h("div.title", null,
      h("h1", null, training.namespace && h("span.dim", null, bdi(training.namespace), "/"), bdi(training.name)),
      pill(phase), state),
    h("p.dim.where", null, joined(
      training.task && h("span", null, "task ", bdi(training.task)),
      training.spec.runtime && bdi(training.spec.runtime),
      nodes && `${nodes} ${nodes === "1" ? "node" : "nodes"}`,
      `attempt ${training.attempt}`,
      training.key && h("span", null, "key ", bdi(training.key)),
      safe(training.href) && link(training.href, "details"))),
    since !== null && h("p.since", null, h("b", null, TERMINAL.has(phase) ? phase : `${phase} for ${short(since)}`),
      h("span.dim", null, TERMINAL.has(phase) ? " since " : ", since "), moment(training.since, taken)),
    message && !repeated && h("p.message", null, bdi(message)),
    training.progress != null && progress(training),
    facts.length > 0 && h("dl.facts", null, facts.map(([name, each]) => h("div", null, h("dt", null, name), h("dd", null, each)))),
  ];
}

function bar(percent, label, phase) {
  const shown = Math.min(100, Math.max(0, Number(percent) || 0));
  const tone = own({ Complete: ".good", Failed: ".bad", Cancelled: ".quiet", Deleted: ".quiet" }, phase) || "";
  return h(`div.progress${tone}`, { role: "progressbar", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(shown) },
    h("div", { style: { width: `${shown}%` } }));
}

function progress(training) {
  const left = training.remaining_seconds;
  return h("div.advance", null, bar(training.progress, "Progress", training.phase), h("p", null, h("b", null, `${value(training.progress)} %`),
    left != null && !TERMINAL.has(training.phase) && [` · about ${short(left)} left`, training.estimate && h("span.dim", null, " (estimate: ", bdi(training.estimate), ")")]));
}

function problem(training) {
  const { diagnosis, blocker } = training;
  const cards = [];
  if (blocker) {
    const place = [blocker.position != null && (blocker.position ? `${plural(blocker.position, "workload")} before it in the queue` : "first in the queue"), blocker.queue && ["queue ", bdi(blocker.queue)]].filter(Boolean);
    cards.push(h(`div.card.${blocker.permanent ? "bad" : "warn"}`, { role: "group", "aria-label": "Blocker" },
      h("p.what", null, icon(blocker.permanent ? "bad" : "wait"), h("span", null, bdi(blocker.message || blocker.reason))),
      blocker.advice && h("p", null, h("span.dim", null, "What to do: "), bdi(blocker.advice)),
      h("p.dim", null, joined(blocker.message && blocker.reason && bdi(blocker.reason), ...place.map(each => h("span", null, each)),
        blocker.permanent && "cannot resolve itself"))));
  }
  if (diagnosis && diagnosis.summary && !blocker?.message?.endsWith(diagnosis.summary)) {
    const tone = training.phase === "Failed" ? "bad" : "warn";
    cards.push(h(`div.card.${tone}`, { role: "group", "aria-label": "Diagnosis" },
      h("p.what", null, icon(tone), h("span", null, bdi(diagnosis.summary))),
      diagnosis.advice && h("p", null, h("span.dim", null, "What to do: "), bdi(diagnosis.advice)),
      h("p.dim", null, joined(bdi(diagnosis.category), diagnosis.outlook && bdi(diagnosis.outlook), diagnosis.rank && bdi(diagnosis.rank),
        diagnosis.exit_code != null && `exit code ${diagnosis.exit_code}`)),
      (diagnosis.log || []).length > 0 && [h("p.dim", null, diagnosis.category === "hang" ? "Stacks" : ["Last lines of ", bdi(diagnosis.rank || "its log")]),
        h("pre", { tabindex: "0", role: "group", "aria-label": diagnosis.category === "hang" ? "Stacks" : "Last lines of the log" }, diagnosis.log.map(line => [bdi(line), "\n"]))]));
  }
  return cards;
}

const notes = texts => texts.map(text => h("p.note", null, icon("warn"), bdi(text)));

function metricRows(training) {
  const compared = training.compare.filter(each => Object.keys(each.metrics).length);
  const drawn = new Set([...Object.keys(training.history), ...training.attempts.flatMap(each => Object.keys(each.history))]);
  const names = [...new Set([...Object.keys(training.metrics), ...compared.flatMap(each => Object.keys(each.metrics))])]
    .filter(name => compared.length || !drawn.has(name));
  const cell = each => (each === undefined ? "" : bdi(value(each)));
  if (!compared.length) return { visible: names.length > 0, content: pairs("Metrics", names.map(name => [named(name), cell(own(training.metrics, name))])) };
  return { visible: names.length > 0, content: table("Metrics", ["metric", ["this training", "number"], ...compared.map(each => [link(each.href, named(each.label)), "number"])],
    names.map(name => h("tr", null, h("th", { scope: "row" }, named(name)),
      [training, ...compared].map(each => own(each.metrics, name)).map(each =>
        h(typeof each === "string" ? "td.number.wide" : "td.number", null, cell(each)))))) };
}

/** The class of a phase or of an activity. */
const SPANS = {
  queued: "queued", starting: "starting", running: "running", active: "active", training: "running", evaluating: "evaluating",
  checkpointing: "checkpointing", repeated: "repeated", stalled: "stalled", restarting: "restarting", stopped: "other",
};

const ACTIVITIES = {
  training: "steps done for the first time", queued: "suspended by Kueue", starting: "scheduling, images, initializers, start of the script",
  evaluating: "steps paused for an evaluation", checkpointing: "steps paused for a checkpoint", repeated: "steps done again after a restart",
  stalled: "steps paused for ten minutes or a shorter stall_timeout", restarting: "from a failure until training continues",
  stopped: "suspended, cancelled, or all ranks had ended",
};

const percent = share => `${(100 * share).toFixed(1)} %`;

/** Activities and their times, training first, then the largest loss. */
function activitiesOf(seconds) {
  const found = Object.entries(seconds ?? {}).filter(([, each]) => Number.isFinite(each) && each > 0);
  return found.sort(([a, x], [b, y]) => (b === "training") - (a === "training") || y - x);
}

function goodput({ goodput: found }) {
  const spent = activitiesOf(found?.seconds);
  const wall = spent.reduce((sum, [, each]) => sum + each, 0);
  const told = spent.map(([name, each]) => `${cut(name)} ${short(each)}, ${percent(each / wall)}`);
  const held = found?.gpu_hours;
  let begin = 0;
  const bars = spent.map(([name, each], index) => {
    const left = (100 * begin) / wall;
    begin += each;
    return h(`span.span.${own(SPANS, name) || "other"}`, { title: told[index], style: { left: `${left}%`, width: `${(100 * each) / wall}%` } },
      h("span", null, `${cut(name)} ${percent(each / wall)}`));
  });
  return {
    visible: wall > 0,
    content: [
      h("p.ratio", null, h("b", null, percent(found?.ratio ?? 0)), ` of ${short(wall)} was training that counted`),
      h("div.track", { role: "img", "aria-label": `Goodput ${percent(found?.ratio ?? 0)}: ${told.join("; ")}` }, bars),
      table("Activities", ["activity", ["time", "number"], ["share", "number"], held && ["GPU-hours", "number"], "meaning"].filter(Boolean),
        spent.map(([name, each]) => h("tr", null,
          h("th", { scope: "row" }, h("span.key", null, h(`span.patch.${own(SPANS, name) || "other"}`), named(name))),
          h("td.number", null, short(each)), h("td.number", null, percent(each / wall)),
          held && h("td.number", null, (own(held, name) ?? 0).toLocaleString("en-US", { maximumFractionDigits: 2 })),
          h("td.wide.dim", null, own(ACTIVITIES, name) ?? "")))),
      found?.assumed > wall / 100 && h("p.dim", null, `${short(found.assumed)} is assumed to be training: nothing tells what was done.`),
    ],
  };
}

/** What an attempt did: activities if they are known, else phases. */
function spansOf({ goodput: found, spans }) {
  const segments = found?.segments ?? [];
  return segments.length ? segments.map(each => ({ phase: each.activity, start: each.start, end: each.end })) : spans;
}

function timeline(training) {
  const { taken } = training;
  const attempts = training.attempts.map(each => ({ ...each, spans: spansOf(each) }));
  const times = attempts.flatMap(each => [each.created, each.finished, ...each.spans.flatMap(span => [span.start, span.end])]).map(when).filter(Number.isFinite);
  const begin = Math.min(...times);
  const end = Math.max(...times, TERMINAL.has(training.phase) ? -Infinity : when(taken) || -Infinity);
  const width = end - begin;
  const at = time => `${Math.min(100, Math.max(0, (100 * (time - begin)) / width))}%`;
  const totals = new Map();
  const rows = width > 0 ? attempts.filter(each => each.spans.length || each.created).map(each => {
    const sums = new Map();
    const spans = each.spans.map(span => {
      const [from, to] = [when(span.start), when(span.end ?? taken)];
      for (const known of [sums, totals]) known.set(span.phase, (known.get(span.phase) || 0) + Math.max(0, to - from));
      const text = `${span.phase} ${short(to - from)}`;
      return h(`span.span.${own(SPANS, span.phase) || "other"}`, { title: text, style: { left: at(from), width: `${(100 * Math.max(0, to - from)) / width}%` } },
        h("span", null, text));
    });
    const marks = each.checkpoints.map(mark => h("span.mark", { title: `checkpoint${mark.step == null ? "" : ` at step ${mark.step}`}`, style: { left: at(when(mark.time)) } }));
    const saved = each.checkpoints.length && plural(each.checkpoints.length, "checkpoint");
    return h("div.attempt", null,
      h("div.label", null, h("b", null, `attempt ${each.attempt}`), " ", pill(each.phase),
        h("span.dim", null, joined([each.restarts && plural(each.restarts, "restart"), saved, each.name !== training.name && named(each.name)].filter(Boolean)))),
      h("div.track", { role: "img", "aria-label": `Attempt ${each.attempt}: ${[...sums].map(([phase, total]) => `${phase} ${short(total)}`).join(", ") || "no phases"}` }, spans, marks),
      each.summary && h("p.dim", null, bdi(each.summary)));
  }) : [];
  const legend = [...totals].map(([phase, total]) => h("span.key", null, h(`span.patch.${own(SPANS, phase) || "other"}`), `${phase} ${short(total)}`));
  if (attempts.some(each => each.checkpoints.length)) legend.push(h("span.key", null, h("span.mark.still"), "checkpoint"));
  const moments = [["created", training.created], ["admitted", training.admitted], ["running", training.running], ["ended", training.finished]].filter(each => each[1]);
  const saved = attempts.flatMap(each => each.checkpoints.map(mark => [each.attempt, mark]));
  return {
    visible: rows.length > 0 || moments.length > 0,
    content: [
      rows.length > 0 && [h("div.attempts", null, rows), h("p.scale", null, moment(new Date(begin * 1000).toISOString()), moment(new Date(end * 1000).toISOString(), new Date(begin * 1000).toISOString())),
        h("p.keys", null, legend)],
      moments.length > 0 && pairs("Times", moments.map(([name, time]) => [name, moment(time), h("span.dim", null, `${short(between(time, taken) ?? 0)} before this page`)])),
      saved.length > 0 && h("details", null, h("summary", null, plural(saved.length, "checkpoint")),
        table("Checkpoints", ["time", ["attempt", "number"], ["step", "number"], "URI"], saved.slice(-200).map(([attempt, mark]) => h("tr", null,
          h("td.time", null, moment(mark.time)), h("td.number", null, String(attempt)), h("td.number", null, mark.step == null ? "" : mark.step.toLocaleString("en-US")), h("td.wide", null, bdi(mark.uri)))))),
    ],
  };
}

function resources({ requested, nodes, used }) {
  const names = Object.entries(requested);
  const meter = (amount, limit, text) => h("div.use", null, h("span", null, text, limit > 0 && h("span.dim", null, ` · ${Math.round((100 * amount) / limit)} %`)),
    limit > 0 && h("div.meter", { "aria-hidden": "true" }, h("div", { style: { width: `${Math.min(100, (100 * amount) / limit)}%` } })));
  return {
    visible: names.length > 0 || (used || []).length > 0,
    content: [
      names.length > 0 && h("dl.facts", null, names.map(([name, amount]) => h("div", null, h("dt", null, named(name)), h("dd", null, named(amount))))),
      names.length > 0 && h("p.dim", null, nodes > 1 ? `Requested for each of ${nodes} nodes.` : "Requested."),
      used && used.length > 0 ? table("Used resources", ["rank", "CPU cores used", "memory used"], used.map(each => h("tr", null, h("th", { scope: "row" }, named(each.rank)),
        h("td", null, each.cpu == null ? "" : meter(each.cpu, quantity(requested.cpu), value(Number(each.cpu.toPrecision(3))))),
        h("td", null, each.memory == null ? "" : meter(each.memory, quantity(requested.memory), bytes(each.memory))))), used.length > 16 ? "tall" : "")
        : h("p.dim", null, "Used: not known."),
    ],
  };
}

function lineage(training) {
  const found = training.lineage;
  const item = (kind, each) => h("li", null, h("p.kind", null, kind), each.name && h("p.name", null, named(each.name)),
    each.uri && h("p.uri", null, uri(each.uri)), each.digest && h("p.digest", { title: cut(each.digest) }, h("bdi", null, String(each.digest).slice(0, LONG_TEXT))));
  const known = new Set(found.outputs.map(each => each.name));
  const outputs = [...found.outputs, ...Object.entries(training.outputs).filter(([name]) => !known.has(name)).map(([name, each]) => ({ name, uri: value(each), digest: "" }))];
  const { registered, evaluation } = found;
  const columns = [
    ["Inputs", [...found.datasets.map(each => item("dataset", each)), found.base_model && item("base model", found.base_model)]],
    ["Outputs", outputs.map(each => item("output", each))],
    ["Registry", [
      registered && h("li", null, h("p.kind", null, "registered version"), h("p.name", null, named(registered.model), " ", h("b", null, named(registered.version)), registered.alias && h("span.tag.info", null, named(registered.alias))),
        registered.uri && h("p.uri", null, uri(registered.uri)), registered.registry && h("p.dim", null, bdi(registered.registry))),
      evaluation && h("li", null, h("p.kind", null, "evaluation"), h("p.name", null, evaluation.passed === null ? h("span.tag.info", null, "no gate")
        : h(`span.tag.${evaluation.passed ? "good" : "bad"}`, null, icon(evaluation.passed ? "good" : "bad"), evaluation.passed ? "passed" : "not passed")),
        evaluation.summary && h("p", null, bdi(evaluation.summary))),
    ]],
  ].map(([title, items]) => [title, items.filter(Boolean)]).filter(([, items]) => items.length);
  return { visible: columns.length > 0, content: h("div.lineage", null, columns.map(([title, items]) => h("div", null, h("h3", null, title), h("ul", null, items)))) };
}

function spec(training) {
  const entries = Object.entries(training.spec);
  const code = new Set(["command", "args", "image"]);
  return { visible: entries.length > 0, content: pairs("Spec", entries.map(([name, each]) => [named(name), h(code.has(name) ? "code" : "span", null, bdi(each))])) };
}

function events({ events: found }) {
  return { visible: found.length > 0, content: table("Events", ["time", "reason", "message"], found.map(each => h("tr", null,
    h("td.time.dim", null, each.time ? moment(each.time) : ""),
    h("td", null, h(each.kind === "Warning" ? "span.state.warn" : "span", null, bdi(each.reason), each.count > 1 && ` ×${each.count}`)),
    h("td.wide", null, bdi(each.message), " ", h("span.dim", null, bdi(each.about))))), found.length > 12 ? "tall" : "") };
}

// The next line is replaced by charts.js, evaluation.js and study.js.
/* parts */

// ---------------------------------------------------------------- the pages

class TrainingPage {
  constructor(root, live) {
    this.head = h("header.panel", { id: "head" });
    this.notes = h("div.notes");
    this.problem = h("div");
    this.slow = h("div.notes");
    this.silent = h("p.panel.dim", { hidden: true }, "This training has not reported a metric.");
    this.nav = h("nav", { "aria-label": "Sections" });
    this.curves = new Curves();
    this.log = new Log(rank => live.choose(rank), Boolean(live.options));
    this.ranks = new Ranks();
    this.evaluation = new Evaluation();
    this.parts = [["metrics", "Metrics", metricRows], ["goodput", "Goodput", goodput], ["timeline", "Timeline", timeline],
      ["resources", "Resources", each => resources(each.resources)],
      ["lineage", "Lineage", lineage], ["spec", "Spec", spec], ["events", "Events", events],
      ["missing", "Missing evidence", each => ({ visible: each.unseen.length > 0, content: notes(each.unseen) })]]
      .map(([id, title, make]) => ({ section: new Section(id, title), make }));
    const [metrics, spent, phases, used, origin, wanted, ...rest] = this.parts.map(each => each.section);
    const elements = sections => sections.map(each => each.element);
    this.sections = [this.curves, metrics, this.evaluation, this.ranks, this.log, spent, phases, origin, used, wanted, ...rest];
    root.replaceChildren(this.head, this.notes, this.problem, this.slow, this.nav, this.silent, ...elements(this.sections.slice(0, 8)),
      h("div.columns", null, elements([used, wanted])), ...elements(rest));
  }

  title(training) {
    return `${[training.namespace, training.name].filter(Boolean).join("/").slice(0, 200)}: ${training.phase}`;
  }

  phases(training) {
    return training.phase;
  }

  terminal(training) {
    return TERMINAL.has(training.phase);
  }

  show(training, state) {
    render(this.head, head(training, state));
    render(this.notes, notes(training.notes));
    render(this.problem, problem(training));
    render(this.slow, notes(training.stragglers.map(each => each.summary)));
    this.curves.update(linesOfTraining(training));
    this.silent.hidden = !this.curves.element.hidden || Object.keys(training.metrics).length > 0 || !training.running;
    this.evaluation.update(training.evaluation ?? null);
    this.ranks.update(training.ranks);
    this.log.update(training.logs, training.ranks.map(rank => rank.rank));
    for (const { section, make } of this.parts) {
      const { visible, content } = make(training);
      section.show(content, visible);
    }
    navigate(this.nav, this.sections);
  }
}

/** Links to the sections. By script: in a frame without an address, a fragment would be one of the page around it. */
function navigate(nav, sections) {
  const shown = sections.filter(each => !each.element.hidden);
  const titles = shown.map(each => each.title).join();
  nav.hidden = shown.length < 3;
  if (nav.dataset.titles === titles) return;
  nav.dataset.titles = titles;
  nav.replaceChildren(...shown.map(each => button(each.title, () => {
    each.element.scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
    each.heading.focus({ preventScroll: true });
  })));
}

function duration(job, taken) {
  const seconds = between(job.created, job.finished ?? (TERMINAL.has(job.phase) ? null : taken));
  return seconds === null ? "" : short(seconds);
}

class ListPage {
  constructor(root) {
    this.head = h("header.panel", { id: "head" });
    this.notes = h("div.notes");
    this.section = new Section("jobs", "Trainings");
    this.section.element.hidden = false;
    Object.assign(this, { query: "", phase: "", all: false });
    this.chips = h("div.chips", { role: "group", "aria-label": "Phases" });
    this.section.control(search("Search trainings", query => { this.query = query; this.fill(); }));
    this.inner = h("div");
    this.count = h("p.dim.count", { role: "status" });
    this.more = button("", () => { this.all = true; this.fill(); }, { hidden: true });
    this.section.body.append(this.chips, this.inner, this.count, this.more);
    root.replaceChildren(this.head, this.notes, this.section.element);
  }

  title(list) {
    return `Trainings in ${list.namespace.slice(0, 200) || "all namespaces"}`;
  }

  phases() {
    return "";
  }

  terminal() {
    return false;
  }

  show(list, state) {
    this.list = list;
    render(this.head, h("div.title", null, h("h1", null, "Trainings in ", bdi(list.namespace || "all namespaces")), state),
      h("p.dim", null, plural(list.jobs.length, "training")));
    render(this.notes, notes(list.notes));
    this.fill();
  }

  fill() {
    const { jobs, taken, namespace } = this.list;
    const counts = new Map();
    for (const job of jobs) counts.set(job.phase, (counts.get(job.phase) || 0) + 1);
    if (this.phase && !counts.has(this.phase)) this.phase = "";
    this.showChips([["", jobs.length], ...[...counts].sort()]);
    const matches = job => !this.query || [job.namespace, job.name, job.key, job.phase, job.message, job.workflow, ...Object.keys(job.metrics)]
      .some(text => String(text ?? "").toLowerCase().includes(this.query));
    const found = jobs.filter(job => (!this.phase || job.phase === this.phase) && matches(job));
    const shown = this.all ? found : found.slice(0, SHOWN_JOBS);
    const has = name => jobs.some(job => job[name] != null && job[name] !== "");
    const columns = [
      ["training", job => [h("p.name", null, link(job.href, named(job.name))), h("p.dim.key", null, joined(
        job.namespace !== namespace && bdi(job.namespace), job.attempt > 1 && `attempt ${job.attempt}`, job.key && named(job.key)))]],
      ["phase", job => pill(job.phase)],
      has("progress") && ["progress", job => job.progress != null && [bar(job.progress, `Progress of ${cut(job.name)}`, job.phase),
        h("p.dim", null, joined(`${value(job.progress)} %`, job.remaining_seconds != null && !TERMINAL.has(job.phase) && `${short(job.remaining_seconds)} left`))]],
      ["created", job => job.created && [moment(job.created, taken), h("p.dim", null, duration(job, taken))]],
      jobs.some(job => Object.keys(job.metrics).length) && ["metrics", job => Object.entries(job.metrics).slice(0, 4).map(([name, each]) =>
        h("p.pair", null, h("span.dim", null, named(name), " "), named(value(each))))],
      has("workflow") && ["workflow", job => link(job.workflow_href, named(job.workflow))],
      has("message") && ["message", job => bdi(job.message)],
    ].filter(Boolean);
    render(this.inner, h("div.cards", null, h("table", { role: "table", "aria-label": "Trainings" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, columns.map(([name]) => h("th", { role: "columnheader", scope: "col" }, name)))),
      h("tbody", { role: "rowgroup" }, shown.map(job => h("tr", { role: "row" }, columns.map(([name, cell]) => {
        const content = cell(job);
        return h("td", { role: "cell", "data-name": name, class: `c-${name}${content && content.length !== 0 ? "" : " empty"}` }, content);
      })))))));
    this.inner.hidden = !found.length;
    this.count.textContent = !jobs.length ? "No trainings." : !found.length ? "No training matches." :
      found.length < jobs.length ? `${plural(found.length, "training")} of ${jobs.length.toLocaleString("en-US")}` : "";
    this.more.hidden = found.length <= shown.length;
    this.more.textContent = `Show all ${plural(found.length, "training")}`;
  }

  showChips(entries) {
    const shown = JSON.stringify([entries, this.phase]);
    if (shown === this.chipsShown) return;
    this.chipsShown = shown;
    const focused = [...this.chips.children].findIndex(each => each === document.activeElement);
    this.chips.replaceChildren(...entries.map(([phase, count]) => button([bdi(phase || "All"), " ", h("span.dim", null, String(count))],
      () => { this.phase = phase; this.fill(); }, { "aria-pressed": String(phase === this.phase) })));
    if (focused >= 0) this.chips.children[Math.min(focused, entries.length - 1)].focus();
  }
}

class WorkflowPage {
  constructor(root) {
    this.head = h("header.panel", { id: "head" });
    this.notes = h("div.notes");
    this.compared = new Section("trainings", "Trainings");
    this.curves = new Curves();
    root.replaceChildren(this.head, this.notes, this.compared.element, this.curves.element);
  }

  title(workflow) {
    return `Trainings of ${workflow.title.slice(0, 200)}`;
  }

  phases(workflow) {
    return workflow.trainings.map(each => `${each.task || each.name} ${each.phase}`).join(", ");
  }

  terminal() {
    return false;
  }

  idle(workflow) {
    return workflow.trainings.length > 0 && workflow.trainings.every(each => TERMINAL.has(each.phase));
  }

  show(workflow, state) {
    const { trainings, taken } = workflow;
    const lines = linesOfWorkflow(workflow);
    render(this.head, h("div.title", null, h("h1", null, bdi(workflow.title)), state), h("p.dim", null, plural(trainings.length, "training")));
    render(this.notes, notes(workflow.notes));
    const metrics = [...new Set(trainings.flatMap(each => Object.keys(each.metrics)))];
    const advancing = trainings.some(each => each.progress != null);
    this.compared.show(table("Trainings", ["task", "phase", "duration", advancing && "progress", ...metrics.map(name => [named(name), "number"])].filter(Boolean), trainings.map((each, index) => h("tr", null,
      h("th", { scope: "row" }, h("p.name", null, swatch(lines[index]), link(each.href, named(each.task || each.name))), each.task && h("p.dim.key", null, named(each.name)),
        each.diagnosis?.summary && h("p.bad.why", null, bdi(each.diagnosis.summary))),
      h("td", null, pill(each.phase)),
      h("td", null, duration(each, each.taken)),
      advancing && h("td", null, each.progress != null && `${value(each.progress)} %`),
      metrics.map(name => h("td.number", null, own(each.metrics, name) === undefined ? "" : bdi(value(own(each.metrics, name)))))))), trainings.length > 0);
    this.curves.update(lines);
  }
}

// ---------------------------------------------------------------- live

/** Requests the document again and again while the page is visible, less often after errors, until the training ends. */
class Live {
  constructor(options) {
    Object.assign(this, { options, rank: "", errors: 0, last: Date.now(), stopped: false, timer: null, running: null, stale: false });
  }

  start(page, document_) {
    this.page = page;
    this.take(document_);
    if (!this.options || this.stopped) return;
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) return;
      this.last = Date.now();
      this.request();
    });
    setInterval(() => this.check(), 1000);
    this.schedule();
  }

  take(document_) {
    const phases = this.page.phases(document_);
    if (this.announced !== undefined && phases !== this.announced) announce(`${this.page.subject || "Phase"}: ${phases}`);
    this.announced = phases;
    this.document = document_;
    this.stopped = this.page.terminal(document_);
    this.stale = false;
    this.show();
  }

  show() {
    const { document: shown, page } = this;
    document.title = plain(page.title(shown));
    page.show(shown, this.state());
    render(document.getElementById("taken"), moment(shown.taken));
  }

  /** How current the page is. */
  state() {
    const { taken, source } = this.document;
    const at = moment(taken, new Date().toISOString());
    if (this.stale) return h("span.fresh.warn", { role: "status" }, icon("warn"), "Not updated since ", at);
    if (source === "kept") return h("span.fresh", { title: "The state that was stored last. The cluster was not read." }, "Kept, stored ", at);
    if (this.stopped) return h("span.fresh", null, "Final, as of ", at);
    if (this.options) return h("span.fresh.live", null, h("i.pulse"), "Live, ", at);
    return h("span.fresh", null, "As of ", at);
  }

  choose(rank) {
    this.rank = rank;
    if (this.options) this.request();
  }

  schedule() {
    clearTimeout(this.timer);
    if (this.stopped) return;
    const seconds = Math.max(0.2, Number(this.options.seconds) || 2);
    const wait = this.page.idle?.(this.document) ? SLOWEST_SECONDS : seconds * 2 ** Math.min(this.errors, 10);
    this.timer = setTimeout(() => this.request(), 1000 * Math.max(seconds, Math.min(SLOWEST_SECONDS, wait)));
  }

  async request() {
    if (document.hidden) return;
    clearTimeout(this.timer);
    this.running?.abort();
    const current = new AbortController();
    this.running = current;
    const limit = setTimeout(() => current.abort(), 15000);
    try {
      const address = this.options.document;
      const rank = this.rank && `${address.includes("?") ? "&" : "?"}rank=${encodeURIComponent(this.rank)}`;
      const response = await fetch(address + rank, { cache: "no-store", headers: { Accept: "application/json" }, signal: current.signal });
      if (!response.ok) throw new Error(`HTTP status ${response.status}`);
      const fresh = await response.json();
      if (this.running !== current) return;
      if (fresh?.version !== 1 || fresh.kind !== this.document.kind) throw new Error("another kind of document");
      this.errors = 0;
      // A server that cannot read the job answers with what it has read last.
      if (fresh.taken !== this.document.taken || fresh.source === "kept") this.last = Date.now();
      this.take(fresh);
    } catch {
      if (this.running !== current) return;
      this.errors += 1;
    } finally {
      clearTimeout(limit);
      if (this.running === current) this.schedule();
    }
  }

  check() {
    const idle = this.page.idle?.(this.document) && !this.errors;
    const stale = !document.hidden && !this.stopped && !idle && Date.now() - this.last > 1000 * Math.max(STALE_SECONDS, 2.5 * (Number(this.options.seconds) || 2));
    if (stale === this.stale) return;
    this.stale = stale;
    this.show();
  }
}

const read = id => JSON.parse(document.getElementById(id).textContent);

function start() {
  const shown = read("document");
  const live = new Live(read("live"));
  const root = h("main", { id: "page" });
  document.getElementById("page").replaceWith(root);
  if (live.options?.list) root.before(h("nav.up", { "aria-label": "Pages" }, link(live.options.list, "All trainings")));
  const pages = { list: ListPage, workflow: WorkflowPage, study: StudyPage };
  live.start(new (pages[shown.kind] || TrainingPage)(root, live), shown);
}

start();
})();
