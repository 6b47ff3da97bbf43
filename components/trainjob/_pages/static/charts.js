// ---------------------------------------------------------------- SVG charts

/** An SVG element: "tag.class.class", attributes, children. */
function s(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElementNS(SVG, name);
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, each] of Object.entries(attributes || {})) if (each != null && each !== false) element.setAttribute(key, each);
  add(element, children);
  return element;
}

const near = each => Number(each.toFixed(1));
const isNumber = each => typeof each === "number" && Number.isFinite(each);

/** Least and most of the numbers, without the argument limit of Math.min. */
function extent(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const each of values) { if (each < least) least = each; if (each > most) most = each; }
  return [least, most];
}

/** Whether values are easier to compare on a logarithmic scale. */
function spansDecades(values, ratio = 100) {
  const [least, most] = extent(values);
  return least > 0 && most / least >= ratio;
}

/** Values -> places between `from` and `to`, in pixels. */
class Scale {
  constructor(values, from, to, { log = false, space = 0.05 } = {}) {
    let [least, most] = extent(log ? values.filter(each => each > 0) : values);
    if (!(least <= most)) [least, most] = log ? [0.1, 1] : [0, 1];
    Object.assign(this, { from, to, log });
    const [a, b] = [this.place(least), this.place(most)];
    const margin = a === b ? (log ? 0.3 : Math.abs(a) * 0.1 || 1) : (b - a) * space;
    this.least = !log && least >= 0 && a - margin < 0 ? 0 : a - margin;
    this.most = b + margin;
  }

  place(each) {
    return this.log ? Math.log10(each) : each;
  }

  /** The place of a value; null if the scale cannot show it. */
  at(each) {
    if (!isNumber(each) || (this.log && each <= 0)) return null;
    return near(this.from + ((this.place(each) - this.least) / (this.most - this.least)) * (this.to - this.from));
  }

  ticks(count, whole = false) {
    const found = [];
    if (this.log) {
      const decades = this.most - this.least;
      const factors = decades > 3 ? [1] : decades > 1 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 8];
      const every = Math.max(1, Math.ceil(decades / count));
      for (let power = Math.floor(this.least); power <= this.most; power += 1) {
        if (power % every) continue;
        for (const factor of factors) {
          const each = factor * 10 ** power;
          if (Math.log10(each) >= this.least && Math.log10(each) <= this.most) found.push(Number(each.toPrecision(3)));
        }
      }
      return found;
    }
    const rough = (this.most - this.least) / Math.max(1, count);
    const power = 10 ** Math.floor(Math.log10(rough));
    let step = [1, 2, 2.5, 5, 10].find(each => each * power >= rough * 0.999) * power;
    if (whole) step = Math.max(1, Math.ceil(step));
    for (let index = Math.ceil(this.least / step - 1e-9); index * step <= this.most + step * 1e-9 && found.length < 50; index += 1) {
      found.push(Number((index * step).toPrecision(12)));
    }
    return found;
  }
}

/** Grid lines and labels of both axes. */
function axes(x, y, { xTitle = "", yTitle = "", wholeX = false, yCount = 5 } = {}) {
  const [left, right, bottom, top] = [x.from, x.to, y.from, y.to];
  const apart = (ticks, scale, pixels) => ticks.filter((each, index, all) => index === 0 || Math.abs(scale.at(each) - scale.at(all[index - 1])) >= pixels || Number.isInteger(Math.log10(each)));
  return s("g.axes", null,
    x.ticks(Math.max(2, Math.floor((right - left) / 80)), wholeX).map(each => [
      s("line.grid", { x1: x.at(each), x2: x.at(each), y1: top, y2: bottom }),
      s("text.tick", { x: x.at(each), y: bottom + 15, "text-anchor": "middle" }, compactNumber(each))]),
    apart(y.ticks(yCount), y, 13).map(each => [
      s("line.grid", { x1: left, x2: right, y1: y.at(each), y2: y.at(each) }),
      s("text.tick", { x: left - 6, y: y.at(each) + 4, "text-anchor": "end" }, compactNumber(each))]),
    xTitle && s("text.tick", { x: right, y: bottom + 30, "text-anchor": "end" }, xTitle.slice(0, 60)),
    yTitle && s("text.tick", { x: left, y: top - 8, "text-anchor": "start" }, cut(yTitle).slice(0, 60)));
}

/** Space for the labels of an axis. */
const room = scale => 14 + 6.6 * Math.max(2, ...scale.ticks(5).map(each => compactNumber(each).length));

const pathOf = points => points.map(([x, y], index) => `${index ? "L" : "M"}${x} ${y}`).join("");

/** A figure whose values can be shown as a table. */
function figure(title, caption, chart, values) {
  const shown = h("div.values", { hidden: true });
  const toggle = button(icon("table"), () => {
    shown.hidden = !shown.hidden;
    toggle.setAttribute("aria-pressed", String(!shown.hidden));
    shown.replaceChildren(...(shown.hidden ? [] : [values()]));
  }, { "aria-pressed": "false", class: "small", title: "Table of values", "aria-label": `Table of values: ${title}` });
  return h("figure.chart", null, h("figcaption", null, h("span.metric", null, named(title)), caption && h("span.dim", null, caption), toggle), chart, shown);
}
