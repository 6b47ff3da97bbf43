// ---------------------------------------------------------------- the evaluation of a model

const SHOWN_CHARTS = 12;   // metrics with bars
const ROW_HEIGHT = 26;     // pixels of a bar

const number = each => (isNumber(each) ? value(each) : "");
const signed = each => (isNumber(each) ? `${each > 0 ? "+" : ""}${value(each)}` : "");
const brief = each => Number(each.toPrecision(3));
const limits = each => (each.interval ? `${signed(each.interval[0])} to ${signed(each.interval[1])}` : "");

/** A number of one metric of all examples and of the slices. */
function barsOf(report, metric) {
  const all = { label: "all examples", all: true, examples: report.examples, each: own(report.metrics, metric) };
  const slices = Object.entries(report.slices).map(([label, each]) => ({ label, examples: each.examples, each: own(each.metrics, metric) }));
  const of = bar => bar.each.difference ?? bar.each.candidate;
  const known = slices.filter(bar => bar.each && isNumber(of(bar))).sort((a, b) => of(a) - of(b));
  return [...(all.each ? [all] : []), ...known];
}

/** Bars of the difference with confidence intervals; without a champion, of the candidate's values. */
function bars(report, metric) {
  const compared = report.champion !== null;
  const rows = barsOf(report, metric);
  const of = bar => (compared ? bar.each.difference : bar.each.candidate);
  const [least, most] = extent([0, ...rows.flatMap(bar => [of(bar), ...(bar.each.interval || [])]).filter(isNumber)]);
  const width = most - least || 1;
  const at = each => `${(3 + (94 * (each - least)) / width).toFixed(2)}%`;
  const height = rows.length * ROW_HEIGHT;
  const what = compared ? `Difference of ${cut(metric)}, candidate minus champion` : `${cut(metric)} of the candidate`;
  const label = `${what}: ${rows.slice(0, 20).map(bar => `${cut(bar.label)} ${compared ? signed(of(bar)) : number(of(bar))}${bar.each.interval ? ` (${limits(bar.each)})` : ""}`).join(", ")}`;
  const chart = s("svg.bars", { role: "img", "aria-label": label, width: "100%", height: height + 20 },
    s("line.zero", { x1: at(0), x2: at(0), y1: 0, y2: height + 3 }),
    s("text.tick", { x: at(0), y: height + 16, "text-anchor": least === 0 ? "start" : most === 0 ? "end" : "middle" }, "0"),
    rows.map((bar, index) => {
      const [middle, each, [low, high]] = [index * ROW_HEIGHT + ROW_HEIGHT / 2, of(bar), bar.each.interval || []];
      const clear = compared && bar.each.interval && (low > 0 || high < 0);
      return s(`g.bar${clear ? ".clear" : ""}${bar.all ? ".all" : ""}`, null,
        s("title", null, `${cut(bar.label)}: ${number(each)}`),
        s("rect", { x: at(Math.min(0, each)), width: `${((94 * Math.abs(each)) / width).toFixed(2)}%`, y: middle - 6, height: 12, rx: 2 }),
        bar.each.interval && [s("line", { x1: at(low), x2: at(high), y1: middle, y2: middle }),
          [low, high].map(end => s("line", { x1: at(end), x2: at(end), y1: middle - 4, y2: middle + 4 }))]);
    }));
  return h("div.forest", { tabindex: "0", role: "group", "aria-label": `Bars of ${cut(metric)}` },
    h("div.names", null, rows.map(bar => h(`div${bar.all ? ".all" : ""}`, null, named(bar.label), bar.examples != null && h("span.dim", null, ` ${bar.examples.toLocaleString("en-US")}`)))),
    chart,
    h("div.numbers", { "aria-hidden": "true" }, rows.map(bar => h("div", null, compared ? signed(brief(of(bar))) : number(brief(of(bar)))))));
}

function barValues(report, metric) {
  return table(`Values of ${cut(metric)}`, ["examples", ["number", "number"], ["candidate", "number"], ["champion", "number"], ["difference", "number"], ["interval", "number"]],
    barsOf(report, metric).map(bar => h("tr", null, h("th", { scope: "row" }, named(bar.label)),
      [bar.examples == null ? "" : bar.examples.toLocaleString("en-US"), number(bar.each.candidate), number(bar.each.champion), signed(bar.each.difference), limits(bar.each)]
        .map(text => h("td.number", null, text)))), "tall");
}

function verdict({ decision }) {
  if (!decision) return h("p.note", null, icon("warn"), "No gate has judged this evaluation.");
  const failed = decision.checks.filter(each => !each.passed).length;
  const tone = decision.passed ? "good" : "bad";
  const checks = decision.checks.length > 0 && table("Checks of the gate", ["result", "rule", "reason"], decision.checks.map(each => h("tr", null,
    h("td", null, h(`span.state.${each.passed ? "good" : "bad"}`, null, icon(each.passed ? "good" : "bad"), each.passed ? " passed" : " failed")),
    h("td.wide", null, h("code", null, bdi(each.rule)), each.rule === decision.rule && h("span.tag.info", null, "decided")),
    h("td.wide", null, bdi(each.reason)))), decision.checks.length > 12 ? "checks.tall" : "checks");
  return [h(`div.card.${tone}.verdict`, { role: "group", "aria-label": "Verdict" },
    h("p.what", null, icon(tone), h("span", null, decision.passed ? "Passed: " : "Not passed: ", bdi(decision.reason))),
    h("p.dim", null, joined(h("span", null, "decided by ", h("code", null, bdi(decision.rule))),
      failed ? `${failed.toLocaleString("en-US")} of ${plural(decision.checks.length, "check")} failed` : `${plural(decision.checks.length, "check")} passed`))), checks];
}

function comparedMetrics(report) {
  const names = Object.keys(report.metrics);
  const compared = report.champion !== null;
  const level = isNumber(report.level) ? `${value(report.level * 100)} % interval` : "interval";
  const methods = [...new Set(Object.values(report.metrics).map(each => each.method).filter(Boolean))];
  return [
    table("Evaluated metrics", ["metric", ["candidate", "number"], ...(compared ? [["champion", "number"], ["difference", "number"], [level, "number"]] : [])],
      names.map(name => {
        const each = report.metrics[name];
        return h("tr", null, h("th", { scope: "row" }, named(name)), h("td.number", null, h("b", null, number(each.candidate))),
          compared && [number(each.champion), signed(each.difference), limits(each)].map(text => h("td.number", null, text)));
      }), "fit"),
    !compared && h("p.dim", null, "There is no champion to compare with."),
    methods.length > 0 && h("p.dim", null, "Intervals of the difference: ", bdi(methods.join(", ")), ".")];
}

function confusion({ labels, counts }) {
  const cells = counts.map(row => {
    const sum = row.reduce((total, each) => total + (each || 0), 0);
    return row.map(each => [each, sum ? Math.min(9, Math.floor((10 * each) / sum)) : 0]);
  });
  const right = counts.reduce((sum, row, index) => sum + (row[index] || 0), 0);
  const all = counts.flat().reduce((sum, each) => sum + (each || 0), 0);
  return h("figure.chart", null,
    h("figcaption", null, h("span.metric", null, "Confusion matrix"), all > 0 && h("span.dim", null, `${value(Number(((100 * right) / all).toPrecision(4)))} % on the diagonal`)),
    h("div.scroll.tall.matrix", { tabindex: "0", role: "group", "aria-label": "Confusion matrix" }, h("table", null,
      h("caption.hidden", null, "Rows: true labels. Columns: predicted labels."),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "true \\ predicted"), labels.map(label => h("th.number", { scope: "col" }, named(label))))),
      h("tbody", null, cells.map((row, index) => h("tr", null, h("th", { scope: "row" }, named(labels[index])),
        row.map(([each, heat], column) => h(`td.number.heat-${heat}${column === index ? ".diagonal" : ""}`, null, number(each)))))))),
    h("p.dim", null, "Rows are true labels, columns predicted ones; the color is the share of the row."));
}

function roc({ false_positive_rate: xs, true_positive_rate: ys }) {
  const points = xs.map((x, index) => [x, ys[index]]).filter(each => each.every(isNumber)).sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  const area = points.slice(1).reduce((sum, [x, y], index) => sum + ((x - points[index][0]) * (y + points[index][1])) / 2, 0);
  const [x, y] = [new Scale([0, 1], 40, 330, { space: 0 }), new Scale([0, 1], 230, 14, { space: 0 })];
  const text = `area ${value(Number(area.toPrecision(4)))}`;
  const chart = s("svg.plain", { viewBox: "0 0 350 268", role: "img", "aria-label": `ROC curve: ${text}, ${plural(points.length, "point")}` },
    axes(x, y, { xTitle: "false positive rate" }), s("text.tick", { x: 46, y: 26 }, "true positive rate"),
    s("path.chance", { d: `M${x.at(0)} ${y.at(0)}L${x.at(1)} ${y.at(1)}` }),
    s("path.curve", { d: pathOf(points.map(([a, b]) => [x.at(a), y.at(b)])) }));
  return figure("ROC curve", text, chart, () => table("Values of the ROC curve", [["false positive rate", "number"], ["true positive rate", "number"]],
    points.slice(0, TABLE_ROWS).map(each => h("tr", null, each.map(rate => h("td.number", null, number(rate))))), "tall"));
}

function evaluated({ report, uri: address }) {
  const object = each => [each.uri && uri(each.uri), each.digest && h("p.digest", null, bdi(each.digest))];
  const { candidate, champion, dataset, code } = report;
  const known = each => Object.values(each || {}).some(Boolean);
  return pairs("Evaluated objects", [
    ["examples", report.examples == null ? "not known" : report.examples.toLocaleString("en-US")],
    known(dataset) && ["dataset", object(dataset)],
    known(candidate) && ["candidate", object(candidate)],
    ["champion", champion ? [(champion.name || champion.version) && h("p", null, bdi(`${champion.name || ""} ${champion.version || ""}`.trim())), object(champion)] : "none"],
    known(code) && ["code", [object(code), code.revision && h("p.digest", null, bdi(code.revision))]],
    address && ["report", uri(address)],
  ].filter(Boolean));
}

class Evaluation extends Section {
  constructor() {
    super("evaluation", "Evaluation");
  }

  update(evaluation) {
    const shown = JSON.stringify(evaluation);
    if (shown === this.shown) return;
    this.shown = shown;
    this.element.hidden = !evaluation;
    if (!evaluation) return this.body.replaceChildren();
    const { report } = evaluation;
    const sliced = Object.keys(report.slices).length > 0;
    const names = Object.keys(report.metrics).filter(name => report.champion !== null || sliced);
    const drawn = names.slice(0, SHOWN_CHARTS);
    const level = report.champion === null ? "" : "candidate minus champion";
    const inSlices = drawn.filter(name => barsOf(report, name).length > 1);
    const charts = (metrics, kind) => metrics.length > 0 && h(`div.charts${kind}`, null,
      metrics.map(name => figure(name, level, bars(report, name), () => barValues(report, name))));
    this.body.replaceChildren();
    add(this.body, [verdict(evaluation), h("h3", null, "Metrics"), comparedMetrics(report),
      charts(inSlices, inSlices.length === 1 ? ".single" : ".pairwise"), charts(drawn.filter(name => !inSlices.includes(name)), ""),
      drawn.length < names.length && h("p.dim", null, `Bars of the first ${drawn.length} of ${names.length} metrics.`),
      drawn.length > 0 && report.champion !== null && h("p.dim.count", null, "Strong bars: the interval of the difference does not include 0. Slices are in the order of their differences."),
      (report.confusion || report.roc) && h("div.charts.pairwise", null, report.confusion && confusion(report.confusion), report.roc && roc(report.roc)),
      h("h3", null, "Evaluated objects"), evaluated(evaluation)]);
  }
}
