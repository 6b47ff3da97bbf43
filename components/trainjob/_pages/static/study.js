// ---------------------------------------------------------------- a study

const SHOWN_TRIALS = 100;      // rows before "Show all"
const SHOWN_AXES = 12;         // of parallel coordinates
const SHOWN_COLUMNS = 12;      // parameters with a column
const SHOWN_CATEGORIES = 14;   // labels of one axis
const FAINT_FROM = 150;        // more lines than this are thin

const STATES = {
  complete: ["good", "good"], running: ["info", "run"], pruned: ["warn", "off"], failed: ["bad", "bad"], stopped: ["quiet", "off"],
};

const stateOf = trial => own(STATES, trial.state) || ["quiet", "off"];
const stateClass = trial => (own(STATES, trial.state) ? trial.state : "other");

function statePill(trial) {
  const [tone, sign] = stateOf(trial);
  return h(`span.pill.${tone}`, null, icon(sign), named(trial.state || "unknown"));
}

/** The mark of a state: also its shape differs, for readers who do not see its color. */
function mark(state, x, y, size = 4) {
  const kind = own(STATES, state) ? state : "other";
  const shapes = {
    complete: () => s("circle", { cx: x, cy: y, r: size }),
    running: () => s("circle", { cx: x, cy: y, r: size - 0.5 }),
    pruned: () => s("path", { d: `M${near(x - size)} ${near(y - size * 0.7)}h${near(2 * size)}L${x} ${near(y + size)}Z` }),
    failed: () => s("path", { d: `M${near(x - size * 0.8)} ${near(y - size * 0.8)}l${near(size * 1.6)} ${near(size * 1.6)}m0 ${near(-size * 1.6)}l${near(-size * 1.6)} ${near(size * 1.6)}` }),
    other: () => s("rect", { x: near(x - size * 0.8), y: near(y - size * 0.8), width: near(size * 1.6), height: near(size * 1.6) }),
  };
  const element = (shapes[kind] || shapes.other)();
  element.setAttribute("class", `state-${kind}`);
  return element;
}

/** The trials of a study, in the orders that its charts need. */
class Trials {
  constructor(study) {
    const { trials } = study;
    this.study = study;
    this.all = trials;
    this.maximize = study.direction === "maximize";
    this.of = new Map(trials.map((each, index) => [each.number, index]));
    this.best = trials[this.of.get(study.best)] || null;
    this.ranked = trials.filter(each => each.state === "complete" && isNumber(each.value)).sort((a, b) => this.compare(a.value, b.value) || a.number - b.number);
    this.rank = new Map(this.ranked.map((each, index) => [each.number, index]));
    const names = [...new Set([...Object.keys(study.importances), ...Object.keys(study.space), ...trials.flatMap(each => Object.keys(each.parameters))])];
    const used = names.filter(name => trials.some(each => own(each.parameters, name) !== undefined));
    this.parameters = used.map((name, index) => [name, own(study.importances, name) ?? -1, index]).sort((a, b) => b[1] - a[1] || a[2] - b[2]).map(each => each[0]);
    this.values = trials.map(each => each.value).filter(isNumber);
  }

  /** Negative if the value `a` is better than `b`. */
  compare(a, b) {
    return this.maximize ? b - a : a - b;
  }

  trial(number) {
    return this.all[this.of.get(number)];
  }

  /** Class of a line: by the rank of the value among all complete trials, from 0, the best fifth, to 4. */
  tone(trial) {
    const rank = this.rank.get(trial.number);
    return rank === undefined ? stateClass(trial) : `fifth-${Math.floor((5 * rank) / this.ranked.length)}`;
  }
}

const shownParameters = (trial, count) => Object.entries(trial.parameters).slice(0, count).map(([name, each]) => `${cut(name)}=${cut(value(each))}`);

/** A chart of trials. The trial at the pointer, or that of the arrow keys, is shown in all charts of the page. */
class TrialChart {
  constructor(page, title, { height = 260, wide = false } = {}) {
    Object.assign(this, { page, title, height, trials: null, width: 0, hits: [] });
    this.svg = s("svg", { role: "presentation" });
    this.hot = s("g.hot");
    this.area = h("div.plot", { tabindex: "0", role: "img", "aria-describedby": "trials-keys",
      keydown: event => this.key(event), blur: () => page.hover(null), pointermove: event => this.point(event), pointerleave: () => page.hover(null),
      click: () => page.hovered !== null && page.reveal(page.hovered) }, this.svg);
    this.tip = h("div.tip", { hidden: true, "aria-hidden": "true" });
    this.frame = h("div.frame", null, wide ? h("div.scroll", null, this.area) : this.area, this.tip);
    this.caption = h("figcaption", null, h("span.metric", null, title));
    this.element = h("figure.chart.trials", null, this.caption, this.frame);
    new ResizeObserver(() => this.resize()).observe(this.frame);
  }

  update(trials) {
    this.trials = trials;
    this.area.setAttribute("aria-label", this.label());
    this.draw();
  }

  resize() {
    const width = Math.floor(this.frame.clientWidth);
    if (!width || width === this.width || !this.trials) return;
    this.draw();
  }

  draw() {
    this.width = Math.floor(this.frame.clientWidth) || 640;
    const width = Math.max(this.width, this.least());
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.area.style.setProperty("min-width", `${this.least()}px`);
    this.hits = [];
    this.svg.replaceChildren();
    add(this.svg, [this.content(width), this.hot]);
    this.show(this.page.hovered);
  }

  least() {
    return 0;
  }

  /** Trials in the order of the arrow keys. */
  order() {
    return this.trials.all.map(each => each.number);
  }

  /** Position of a pointer in the chart. */
  position(event) {
    const box = this.svg.getBoundingClientRect();
    const width = Math.max(this.width, this.least());
    return [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * this.height) / box.height];
  }

  point(event) {
    const [x, y] = this.position(event);
    this.pointed = x;
    this.page.hover(this.nearest(x, y), this);
  }

  nearest(x, y) {
    let [found, least] = [null, 40 ** 2];
    for (const [left, top, number] of this.hits) {
      const distance = (left - x) ** 2 + (top - y) ** 2;
      if (distance < least) [found, least] = [number, distance];
    }
    return found;
  }

  show(number, source) {
    const trial = number === null ? null : this.trials?.trial(number);
    this.hot.replaceChildren();
    if (trial) add(this.hot, [this.highlight(trial)]);
    this.tip.hidden = !trial || source !== this;
    if (this.tip.hidden) return;
    render(this.tip, this.page.describe(trial));
    const place = this.pointed ?? this.hits.find(each => each[2] === number)?.[0] ?? this.width / 2;
    const left = place - (this.frame.querySelector(".scroll")?.scrollLeft || 0);
    this.tip.style.setProperty("left", `${Math.max(0, left + 14 + this.tip.offsetWidth > this.width ? left - 14 - this.tip.offsetWidth : left + 14)}px`);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey || !this.trials) return;
    const order = this.order();
    const far = Math.max(1, Math.round(order.length / 10));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageDown: -far, PageUp: far, Home: -order.length, End: order.length };
    if (event.key === "Escape") this.page.hover(null);
    else if (event.key === "Enter" && this.page.hovered !== null) this.page.reveal(this.page.hovered);
    else if (event.key in moves && order.length) {
      const current = order.indexOf(this.page.hovered);
      this.pointed = null;
      const start = current >= 0 ? current : moves[event.key] < 0 ? order.length : -1;
      const next = order[Math.min(order.length - 1, Math.max(0, start + moves[event.key]))];
      this.page.hover(next, this);
      announce(this.page.sentence(this.trials.trial(next)));
    } else return;
    event.preventDefault();
  }
}

/** The value of each trial, and the best so far. */
class History extends TrialChart {
  constructor(page) {
    super(page, "Optimization history", { height: 300 });
  }

  label() {
    const { best, study, all } = this.trials;
    return `Optimization history of ${cut(study.metric)}: ${plural(all.length, "trial")}${best ? `, best ${value(best.value)} in trial ${best.number}` : ""}`;
  }

  content(width) {
    const { all, study, values } = this.trials;
    const log = this.page.log && values.some(each => each > 0);
    const without = all.filter(each => !isNumber(each.value) || (log && each.value <= 0));
    const bottom = this.height - 36;
    const y = new Scale(values, bottom - (without.length ? 24 : 4), 24, { log });
    const x = new Scale(all.map(each => each.number), room(y), width - 14, { space: 0.02 });
    const line = [];
    let best = null;
    const marks = all.map(trial => {
      const left = x.at(trial.number);
      const top = y.at(trial.value);
      if (trial.state === "complete" && top !== null && (best === null || this.trials.compare(trial.value, best) < 0)) {
        if (best !== null) line.push([left, y.at(best)]);
        best = trial.value;
        line.push([left, top]);
      }
      this.hits.push([left, top ?? bottom - 9, trial.number]);
      return mark(trial.state, left, top ?? bottom - 9, all.length > 300 ? 3 : 4.5);
    });
    if (best !== null) line.push([x.at(all.at(-1).number), y.at(best)]);
    return [axes(x, { ...y, from: bottom, at: y.at.bind(y), ticks: y.ticks.bind(y) }, { xTitle: "trial", yTitle: study.metric, wholeX: true }),
      without.length > 0 && s("text.tick", { x: x.from - 6, y: bottom - 5, "text-anchor": "end" }, "none"),
      line.length > 0 && s("path.best-so-far", { d: pathOf(line) }), s("g.marks", null, marks)];
  }

  highlight(trial) {
    const hit = this.hits.find(each => each[2] === trial.number);
    return hit && s("circle.ring", { cx: hit[0], cy: hit[1], r: 8 });
  }
}

/** One vertical axis of parallel coordinates: the places of the values of a parameter. */
class Axis {
  constructor(name, values, { top, bottom, type, log, missing }) {
    Object.assign(this, { name, missing: missing ? bottom : null });
    const lowest = missing ? bottom - 26 : bottom;
    const known = [...new Set(values)];
    this.categories = type === "categorical" || !known.every(isNumber) ? known.sort((a, b) => (isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b)))) : null;
    if (this.categories) {
      const gap = this.categories.length > 1 ? (lowest - top) / (this.categories.length - 1) : 0;
      this.places = new Map(this.categories.map((each, index) => [each, near(this.categories.length > 1 ? lowest - index * gap : (top + lowest) / 2)]));
    } else {
      this.few = known.length <= 6 ? known.sort((a, b) => b - a) : null;
      this.scale = new Scale(known, lowest, top, { log: known.every(each => each > 0) && (log || spansDecades(known)), space: 0.03 });
    }
  }

  at(each) {
    if (each === undefined || each === null) return this.missing;
    return this.categories ? this.places.get(each) ?? null : this.scale.at(each);
  }

  labels() {
    if (!this.categories) {
      let last = Infinity;
      const ticks = this.few ? [...this.few].reverse() : this.scale.ticks(6);
      return ticks.filter(each => last - this.scale.at(each) >= 13 && ((last = this.scale.at(each)), true)).map(each => [compactNumber(each), this.scale.at(each)]);
    }
    const every = Math.ceil(this.categories.length / SHOWN_CATEGORIES);
    return this.categories.filter((_, index) => index % every === 0).map(each => [cut(value(each)), this.places.get(each)]);
  }
}

class Parallel extends TrialChart {
  constructor(page) {
    super(page, "Parallel coordinates", { height: 330, wide: true });
  }

  label() {
    return `Parallel coordinates of ${plural(this.shown().length, "parameter")} and ${cut(this.trials.study.metric)}; the arrow keys go from the best trial to the worst`;
  }

  shown() {
    return this.trials.parameters.slice(0, SHOWN_AXES);
  }

  least() {
    return this.trials ? 100 * (this.shown().length + 1) : 0;
  }

  order() {
    const ranked = this.trials.ranked.map(each => each.number);
    return [...ranked, ...this.trials.all.map(each => each.number).filter(each => !this.trials.rank.has(each))];
  }

  content(width) {
    const { all, study, ranked } = this.trials;
    const [top, bottom] = [44, this.height - 16];
    const space = own(study, "space") || {};
    const made = this.shown().map(name => {
      const found = all.map(each => own(each.parameters, name));
      const { type, log } = own(space, name) || {};
      return new Axis(name, found.filter(each => each !== undefined && each !== null), { top, bottom, type, log, missing: found.some(each => each === undefined) });
    });
    // Values of trials that have not completed belong to earlier steps.
    const objective = new Axis(study.metric, ranked.length ? ranked.map(each => each.value) : [0], { top, bottom, log: this.page.log, type: "float", missing: false });
    this.axes = [...made, objective];
    const [first, last] = [50, width - 52];
    this.places = this.axes.map((_, index) => near(first + (index * (last - first)) / (this.axes.length - 1 || 1)));
    this.lines = new Map();
    for (const trial of all) {
      const points = this.axes.map((axis, index) => [this.places[index], index < made.length ? axis.at(own(trial.parameters, axis.name)) : this.trials.rank.has(trial.number) ? axis.at(trial.value) : null]);
      this.lines.set(trial.number, points.filter(each => each[1] !== null));
    }
    for (const [number, points] of this.lines) points.forEach(each => this.hits.push([...each, number]));
    const order = [...all.filter(each => !this.trials.rank.has(each.number)), ...[...ranked].reverse()];
    return [
      s(`g.lines${all.length > FAINT_FROM ? ".faint" : ""}`, null, order.map(trial => this.line(trial, trial.number === study.best ? "best" : this.trials.tone(trial)))),
      this.axes.map((axis, index) => s("g.axis", null,
        s("line", { x1: this.places[index], x2: this.places[index], y1: top - 6, y2: bottom + 6 }),
        s("text.name", { x: this.places[index], y: index % 2 && this.axes.length > 4 ? 30 : 14, "text-anchor": "middle" }, s("title", null, cut(axis.name)), shortened(axis.name, 16)),
        axis.labels().map(([text, y]) => s("text.tick.halo", { x: this.places[index] + 5, y: y + 4 }, shortened(text, 12))),
        axis.missing !== null && s("text.tick.halo", { x: this.places[index] + 5, y: axis.missing + 4 }, "not used")))];
  }

  line(trial, tone) {
    const points = this.lines.get(trial.number) || [];
    return points.length > 1 && s(`path.${tone}`, { d: pathOf(points) });
  }

  /** The trial whose line is the nearest one at the pointer. */
  nearest(x, y) {
    let [found, least] = [null, 24];
    for (const [number, points] of this.lines) {
      for (let index = 1; index < points.length; index += 1) {
        const [[x1, y1], [x2, y2]] = [points[index - 1], points[index]];
        if (x < x1 || x > x2) continue;
        const distance = Math.abs(y1 + ((y2 - y1) * (x - x1)) / (x2 - x1) - y);
        if (distance < least) [found, least] = [number, distance];
      }
    }
    return found;
  }

  highlight(trial) {
    return [this.line(trial, "ring"), (this.lines.get(trial.number) || []).map(([x, y]) => s("circle.dot", { cx: x, cy: y, r: 3.5 }))];
  }
}

const shortened = (text, count) => (cut(text).length > count ? `${cut(text).slice(0, count - 1)}…` : cut(text));

/** Values during the trials. */
class LearningCurves extends TrialChart {
  constructor(page) {
    super(page, "Learning curves", { height: 320 });
  }

  label() {
    return `Learning curves: ${cut(this.trials.study.metric)} over steps of ${plural(this.drawn().length, "trial")}`;
  }

  drawn() {
    return this.trials.all.filter(each => each.values.length);
  }

  order() {
    return this.drawn().map(each => each.number);
  }

  content(width) {
    const { study, best } = this.trials;
    const drawn = this.drawn();
    const points = drawn.flatMap(each => each.values).filter(each => isNumber(each[0]) && isNumber(each[1]));
    const log = this.page.log && points.some(each => each[1] > 0);
    const y = new Scale(points.map(each => each[1]), this.height - 36, 24, { log });
    const x = new Scale(points.map(each => each[0]), room(y), width - 14, { space: 0.01 });
    this.lines = new Map(drawn.map(trial => [trial.number, trial.values.map(([step, each]) => [x.at(step), y.at(each)]).filter(each => each[0] !== null && each[1] !== null)]));
    for (const [number, line] of this.lines) line.forEach(each => this.hits.push([...each, number]));
    const { rank } = this.trials;
    const weight = trial => (rank.has(trial.number) ? drawn.length - rank.get(trial.number) : trial.state === "running" ? 0 : -1);
    return [axes(x, y, { xTitle: "step", yTitle: study.metric }),
      s(`g.lines${drawn.length > FAINT_FROM ? ".faint" : ""}`, null, [...drawn].sort((a, b) => weight(a) - weight(b)).map(trial => this.line(trial, trial === best ? "best" : this.trials.tone(trial))))];
  }

  line(trial, tone) {
    const points = this.lines?.get(trial.number) || [];
    if (points.length === 1) return s(`circle.point.${tone}`, { cx: points[0][0], cy: points[0][1], r: 2.5 });
    return points.length > 1 && s(`path.${tone}`, { d: pathOf(points) });
  }

  highlight(trial) {
    return this.line(trial, "ring");
  }
}

/** All trials. */
class TrialTable extends Section {
  constructor(page) {
    super("trials", "Trials");
    Object.assign(this, { page, state: "", sort: "value", descending: false, all: false });
    this.chips = h("div.chips", { role: "group", "aria-label": "States" });
    this.inner = h("div");
    this.count = h("p.dim.count", { role: "status" });
    this.more = button("", () => { this.all = !this.all; this.fill(); }, { hidden: true });
    this.body.append(this.chips, this.inner, this.count, this.more);
  }

  update(trials) {
    this.trials = trials;
    this.element.hidden = !trials.all.length;
    this.fill();
  }

  columns() {
    const { study, all, parameters } = this.trials;
    const columns = parameters.slice(0, SHOWN_COLUMNS);
    const others = parameters.slice(SHOWN_COLUMNS);
    const metrics = [...new Set(all.flatMap(each => Object.keys(each.metrics)))].filter(name => name !== study.metric).slice(0, 6);
    return [
      ["trial", trial => trial.number, trial => [h("p.name", null, link(trial.href, `trial ${trial.number}`), trial === this.trials.best && h("span.tag.good", null, "best")),
        trial.job && h("p.dim.key", null, named(trial.job))], ""],
      ["value", trial => trial.value, trial => number(trial.value), "number"],
      ["state", trial => trial.state, trial => [statePill(trial), trial.reason && h("p.dim.key.reason", null, bdi(trial.reason))], ""],
      ...columns.map(name => [`parameter ${name}`, trial => own(trial.parameters, name), trial => {
        const each = own(trial.parameters, name);
        return each === undefined ? h("span.dim", null, "–") : named(value(each));
      }, all.every(trial => own(trial.parameters, name) === undefined || isNumber(own(trial.parameters, name))) ? "number" : "", name]),
      others.length > 0 && ["other parameters", null, trial => bdi(others.filter(name => own(trial.parameters, name) !== undefined).map(name => `${name}=${value(own(trial.parameters, name))}`).join(", ")), "wide"],
      ...metrics.map(name => [`metric ${name}`, trial => own(trial.metrics, name), trial => (own(trial.metrics, name) === undefined ? "" : named(value(own(trial.metrics, name)))), "number", name]),
      all.some(each => each.seconds > 0) && ["duration", trial => trial.seconds, trial => (trial.seconds > 0 ? short(trial.seconds) : ""), "number"],
    ].filter(Boolean);
  }

  sorted(columns) {
    const found = this.trials.all.filter(trial => !this.state || trial.state === this.state);
    if (this.sort === "value" && !this.descending) {
      // The best first: complete trials, then others with a value, then those without.
      const weight = trial => (this.trials.rank.has(trial.number) ? 0 : isNumber(trial.value) ? 1 : 2);
      return found.sort((a, b) => weight(a) - weight(b) || (weight(a) < 2 ? this.trials.compare(a.value, b.value) : 0) || a.number - b.number);
    }
    const key = columns.find(each => each[0] === this.sort)?.[1] || (trial => trial.number);
    const missing = each => each === undefined || each === null;
    return found.map(trial => [key(trial), trial]).sort(([a, first], [b, second]) => {
      if (missing(a) || missing(b)) return missing(a) - missing(b) || first.number - second.number;
      const order = isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b));
      return (this.sort === "value" && !this.trials.maximize !== this.descending ? 1 : this.descending ? -1 : 1) * order || first.number - second.number;
    }).map(each => each[1]);
  }

  fill() {
    const columns = this.columns();
    const { all, study } = this.trials;
    const counts = new Map();
    for (const trial of all) counts.set(trial.state, (counts.get(trial.state) || 0) + 1);
    if (this.state && !counts.has(this.state)) this.state = "";
    const found = this.sorted(columns);
    const shown = this.all ? found : found.slice(0, SHOWN_TRIALS);
    this.showChips([["", all.length], ...[...counts].sort()]);
    // The listeners of the heads are those of the first head at the same place, which find their column by its name.
    render(this.inner, h("div.scroll.tall.trial-table", { tabindex: "0", role: "group", "aria-label": "Trials" }, h("table", null,
      h("thead", null, h("tr", null, columns.map(([name, key, , kind, label]) =>
        h(kind === "number" ? "th.number" : "th", { scope: "col", "aria-sort": this.sort === name ? (this.descending ? "descending" : "ascending") : null },
          key ? h("button.sort", { type: "button", "data-sort": name, title: cut(`Sort by ${name}`) }, named(label || (name === "value" ? study.metric : name)), this.sort === name && h("span", { "aria-hidden": "true" }, this.descending ? " ▾" : " ▴"))
            : named(label || name))))),
      h("tbody", null, shown.map(trial => h(`tr${trial === this.trials.best ? ".best" : ""}`, { "data-trial": String(trial.number), tabindex: "-1" }, columns.map(([name, , cell, kind]) =>
        (name === "trial" ? h("th", { scope: "row" }, cell(trial)) : h(kind ? `td.${kind}` : "td", null, cell(trial))))))))));
    if (!this.listening) {
      this.listening = true;
      this.inner.addEventListener("click", event => {
        const name = event.target.closest("button.sort")?.dataset.sort;
        if (name !== undefined) this.order(name);
      });
    }
    const part = shown.length < found.length ? `; the first ${shown.length} are shown` : "";
    this.count.textContent = found.length < all.length ? `${plural(found.length, "trial")} of ${all.length.toLocaleString("en-US")}${part}` : part && `${plural(all.length, "trial")}${part}`;
    this.more.hidden = found.length <= SHOWN_TRIALS;
    this.more.textContent = this.all ? `Show ${SHOWN_TRIALS} trials` : `Show all ${plural(found.length, "trial")}`;
  }

  order(name) {
    this.descending = this.sort === name && !this.descending;
    this.sort = name;
    this.fill();
  }

  showChips(entries) {
    const shown = JSON.stringify([entries, this.state]);
    if (shown === this.chipsShown) return;
    this.chipsShown = shown;
    const focused = [...this.chips.children].findIndex(each => each === document.activeElement);
    this.chips.replaceChildren(...entries.map(([state, count]) => button([named(state || "All"), " ", h("span.dim", null, count.toLocaleString("en-US"))],
      () => { this.state = state; this.fill(); }, { "aria-pressed": String(state === this.state) })));
    if (focused >= 0) this.chips.children[Math.min(focused, entries.length - 1)].focus();
  }

  /** Scroll to the row of a trial. */
  reveal(number) {
    this.state = "";
    this.all = this.all || !this.sorted(this.columns()).slice(0, SHOWN_TRIALS).some(each => each.number === number);
    this.fill();
    const found = this.inner.querySelector(`tr[data-trial="${number}"]`);
    found?.scrollIntoView({ block: "center" });
    found?.focus({ preventScroll: true });
  }
}

class StudyPage {
  constructor(root) {
    Object.assign(this, { subject: "Study", log: null, hovered: null });
    this.head = h("header.panel", { id: "head" });
    this.notes = h("div.notes");
    this.problem = h("div");
    this.nav = h("nav", { "aria-label": "Sections" });
    this.curves = new Section("curves", "Curves");
    this.logBox = checkbox("Log scale", false, checked => { this.log = checked; this.draw(); });
    this.curves.control(this.logBox);
    this.importances = new Section("importances", "Parameter importance");
    this.charts = [new History(this), new Parallel(this), new LearningCurves(this)];
    this.keys = h("p.keys");
    this.curves.body.append(this.keys, h("p.hidden", { id: "trials-keys" }, "Left and right arrow keys go to the next trial, Enter shows it in the table."),
      h("div.charts.single", null, this.charts.map(each => each.element)));
    this.table = new TrialTable(this);
    root.replaceChildren(this.head, this.notes, this.problem, this.nav, this.curves.element, this.importances.element, this.table.element);
  }

  title(study) {
    return `Study ${study.title.slice(0, 200)}: ${study.state}`;
  }

  phases(study) {
    return study.best === null ? study.state : `${study.state}, best trial ${study.best}`;
  }

  terminal(study) {
    return study.state === "ended";
  }

  show(study, state) {
    render(this.notes, notes(study.notes));
    const key = JSON.stringify([study.trials.length, study.best, study.importances, study.trials.map(each => [each.state, each.value, each.values.length, each.seconds, each.href])]);
    if (key !== this.key) {
      this.key = key;
      this.trials = new Trials(study);
      this.changed = true;
    }
    render(this.head, this.heading(study, state));
    render(this.problem, this.failures(study));
    if (!this.changed) return;
    this.changed = false;
    if (this.log === null && this.trials.values.length) {
      this.log = spansDecades(this.trials.values, 1000);
      this.logBox.querySelector("input").checked = this.log;
    }
    this.curves.element.hidden = !study.trials.length;
    const [, parallel, curves] = this.charts;
    parallel.element.hidden = !this.trials.parameters.length;
    curves.element.hidden = !study.trials.some(each => each.values.length);
    this.showKeys(study);
    this.draw();
    this.showImportances(study);
    this.table.update(this.trials);
    navigate(this.nav, [this.curves, this.importances, this.table]);
    if (!performance.getEntriesByName("trainjob-study").length) performance.mark("trainjob-study");
  }

  draw() {
    for (const chart of this.charts) if (!chart.element.hidden) chart.update(this.trials);
  }

  showKeys(study) {
    const found = [...new Set(study.trials.map(stateClass))];
    const key = state => h("span.key", null, s("svg.sample", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" }, mark(state, 6, 6)), state);
    const hidden = this.trials.parameters.length - SHOWN_AXES;
    render(this.keys, found.map(key), h("span.key", null, s("svg.sample", { viewBox: "0 0 20 12", width: 20, height: 12, "aria-hidden": "true" }, s("path.best-so-far", { d: "M0 6H20" })), "best so far"),
      h("span.key", null, s("svg.sample", { viewBox: "0 0 50 12", width: 50, height: 12, "aria-hidden": "true" }, [0, 1, 2, 3, 4].map(each => s(`rect.fifth-${each}`, { x: each * 10, y: 2, width: 10, height: 8 }))), "best to worst fifth"),
      hidden > 0 && h("span.dim", null, `Parallel coordinates: the first ${SHOWN_AXES} parameters of ${this.trials.parameters.length}.`));
  }

  heading(study, state) {
    const { counts, limits, metric, direction, best } = study;
    const total = Object.values(counts).reduce((sum, each) => sum + each, 0);
    const ended = total - (own(counts, "running") || 0);
    const trial = best === null ? null : this.trials.trial(best);
    const tone = this.terminal(study) ? (trial ? ["good", "good"] : ["bad", "bad"]) : ["info", "run"];
    const share = limits.max_trials > 0 ? (100 * ended) / limits.max_trials : null;
    const parameters = trial ? Object.entries(trial.parameters) : [];
    return [
      h("div.title", null, h("h1", null, "Study ", bdi(study.title)), h(`span.pill.${tone[0]}`, null, icon(tone[1]), named(study.state)), state),
      h("p.dim.where", null, joined(h("span", null, `${direction} `, bdi(metric)), study.namespace && bdi(study.namespace), limits.parallel && `${limits.parallel} at once`,
        study.key && h("span", null, "key ", bdi(study.key)))),
      study.reason && h("p.message", null, bdi(study.reason)),
      h("div.advance", null, share !== null && bar(share, "Trials that have ended", this.terminal(study) ? (trial ? "Complete" : "Failed") : ""),
        h("p", null, h("b", null, limits.max_trials ? `${ended.toLocaleString("en-US")} of ${plural(limits.max_trials, "trial")} ended` : `${plural(ended, "trial")} ended`),
          h("span.dim", null, Object.entries(counts).sort().map(([name, count]) => [" · ", `${count.toLocaleString("en-US")} `, named(name)])))),
      trial && h("dl.facts.best-trial", null,
        h("div.main", null, h("dt", null, "best ", named(metric)), h("dd", null, number(trial.value), " ", h("span.where-best", null, "in ", link(trial.href, `trial ${trial.number}`)))),
        parameters.slice(0, 24).map(([name, each]) => h("div", null, h("dt", null, named(name)), h("dd", null, named(value(each))))),
        parameters.length > 24 && h("div", null, h("dt", null, "more"), h("dd", null, plural(parameters.length - 24, "parameter")))),
    ];
  }

  /** Why no trial has completed. */
  failures(study) {
    const failed = study.trials.filter(each => each.state === "failed");
    if (study.best !== null || !failed.length) return [];
    const reasons = new Map();
    for (const { reason } of failed) reasons.set(reason, (reasons.get(reason) || 0) + 1);
    const [reason, count] = [...reasons].sort((a, b) => b[1] - a[1])[0];
    return h("div.card.bad", { role: "group", "aria-label": "Failures" }, h("p.what", null, icon("bad"), h("span", null, "No trial has completed.")),
      h("p", null, `${plural(count, "trial")} failed: `, bdi(reason || "no reason is known")));
  }

  showImportances(study) {
    const found = Object.entries(study.importances).filter(each => isNumber(each[1])).sort((a, b) => b[1] - a[1]);
    const most = Math.max(1e-9, ...found.map(each => each[1]));
    this.importances.show([table("Parameter importance", ["parameter", "importance", ["share", "number"]], found.map(([name, each]) => h("tr", null,
      h("th", { scope: "row" }, named(name)),
      h("td.use", null, h("div.meter", { "aria-hidden": "true" }, h("div", { style: { width: `${(100 * Math.max(0, each)) / most}%` } }))),
      h("td.number", null, value(Number(each.toPrecision(3)))))), "importances"),
    h("p.dim", null, "The share of the differences between the values of the trials that a parameter explains.")], found.length > 0);
  }

  hover(number, source) {
    if (number === this.hovered && (number === null || source === this.source)) return;
    Object.assign(this, { hovered: number, source });
    for (const chart of this.charts) if (!chart.element.hidden) chart.show(number, source);
  }

  reveal(number) {
    this.table.reveal(number);
  }

  describe(trial) {
    return [h("div.entry", null, h("b", null, `trial ${trial.number}`), h("span.dim", null, cut(trial.state)), trial === this.trials.best && h("span.good", null, "best")),
      isNumber(trial.value) && h("div.entry", null, h("span.name", null, named(this.trials.study.metric)), h("b", null, value(trial.value))),
      Object.entries(trial.parameters).slice(0, 10).map(([name, each]) => h("div.entry", null, h("span.name.dim", null, named(name)), h("span", null, shortened(value(each), 24)))),
      trial.reason && h("div.dim", null, shortened(trial.reason, 100))];
  }

  sentence(trial) {
    return [`trial ${trial.number}, ${cut(trial.state)}`, isNumber(trial.value) && `${cut(this.trials.study.metric)} ${value(trial.value)}`, ...shownParameters(trial, 8)].filter(Boolean).join(", ");
  }
}
