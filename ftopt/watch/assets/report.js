/**
 * The report: inlined data, drawn once. Data from a run are shown as text only (`textContent`).
 *
 * A report has `runs` and, if there are several, `sections` that compare them; a section has blocks; a block is a text,
 * a list, a table, a plot, or preformatted text. The shapes of a plot are flat lists of numbers.
 */
const report = (() => {
  const WIDTH = 1000, CLOCK_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const NUMBER = /^(|\u2013|below.*|[\u2212-]?\d[\d.,:e+-]*(\s?(%|bytes|[kMGT]B|ms|s|min|h|days).*)?)$/;

  function make(name, className = "", ...children) {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children.filter((x) => x !== null));
    return node;
  }

  function shape(name, attributes, title = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (title) {
      const text = document.createElementNS("http://www.w3.org/2000/svg", "title");
      text.textContent = title;
      node.append(text);
    }
    return node;
  }

  // ------------------------------------------------------------ axes

  function clock(s) {
    const all = Math.floor(Math.abs(s)), two = (x) => String(x).padStart(2, "0");
    const hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60, sign = s < -0.5 ? "\u2212" : "";
    return sign + (hours ? `${hours}:${two(minutes)}:${two(all % 60)}` : `${minutes}:${two(all % 60)}`);
  }

  /** Minimum and maximum, and whether they are seconds since the start ("clock"), seconds ("s"), or numbers. */
  function axis([from, to, kind = ""], count) {
    let least = from, most = to;
    if (!(most > least)) [least, most] = kind ? [least, least + 0.1] : [least - 0.5, least + 0.5];
    const rough = (most - least) / count, power = 10 ** Math.floor(Math.log10(rough));
    let step = power * [1, 2, 2.5, 5, 10].find((x) => power * x >= rough * 0.999);
    const asClock = kind === "clock" && most - least >= count;
    if (asClock) step = CLOCK_S.find((x) => x >= rough) ?? 86400 * Math.ceil(rough / 86400);
    const ticks = [];
    for (let n = Math.ceil(least / step - 1e-9); n * step <= most + step * 1e-9; n += 1) ticks.push(n * step);
    const plain = (x) => Number(x.toPrecision(10)).toLocaleString("en", { maximumSignificantDigits: 10 });
    const text = (x) => (asClock ? clock(x) : kind ? `${plain(x)} s` : plain(x));
    const part = (x) => Math.min(1, Math.max(0, (x - least) / (most - least)));
    return { part, ticks: ticks.map((x) => [part(x), text(x)]) };
  }

  // ------------------------------------------------------------ blocks

  function drawn(plot) {
    const height = plot.height ?? 240, rows = plot.rows, x = axis(plot.x, plot.x[3] ?? 6);
    const y = rows ? { part: (v) => 1 - v / rows.length, ticks: [] } : axis(plot.y, 5);
    const across = (v) => (WIDTH * x.part(v)).toFixed(1), up = (v) => (height * (1 - y.part(v))).toFixed(1);
    const grid = x.ticks.map(([at]) => `M${WIDTH * at} 0v${height}`).concat(y.ticks.map(([at]) => `M0 ${height * (1 - at)}h${WIDTH}`));
    const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": plot.label });
    picture.append(shape("path", { d: grid.join(""), class: "grid" }));
    for (const each of plot.shapes) {
      const { kind, points } = each, parts = [], flat = kind === "line" && points.length === 2;
      for (let n = 0; n < points.length; n += kind === "marks" ? 1 : 2) {
        const [a, b] = [points[n], points[n + 1]];
        if (kind === "line") parts.push(`${n && !flat ? "L" : "M"}${across(a)} ${up(b)}${flat ? "h0" : ""}`);
        else if (kind === "dots") parts.push(`M${across(a)} ${up(b)}h0`);
        else if (kind === "marks") parts.push(`M${across(a)} ${up(each.row + 0.2)}V${up(each.row + 1)}`);
        else parts.push(`M${across(a)} ${up(each.row + 0.12)}H${Math.max(across(b), +across(a) + 0.1)}V${up(each.row + 0.88)}H${across(a)}z`);
      }
      picture.append(shape("path", { d: parts.join(""), class: `${flat ? "dots" : kind} ${each.class}` }, each.name));
    }
    const label = (side, at, text) => {
      const node = make("span", "", text);
      node.style[side] = `${100 * at}%`;
      return node;
    };
    const left = rows ? rows.map((text, n) => label("top", (n + 0.5) / rows.length, text))
      : y.ticks.map(([at, text]) => label("top", 1 - at, text));
    const area = make("div", "area", picture), whole = make("div", "axes", make("div", "y", ...left), area,
      make("div", "x", ...x.ticks.map(([at, text]) => label("left", at, text))));
    area.style.height = `${height}px`;
    whole.style.setProperty("--labels", `${Math.min(14, Math.max(0, ...left.map((node) => node.textContent.length)))}ch`);
    return make("figure", "", whole, make("figcaption", "", plot.caption));
  }

  function legend(entries) {
    return make("p", "legend", ...entries.map(([kind, text]) => make("span", "", make("i", kind), text)));
  }

  function table({ head, rows, title, fold }) {
    const numbers = (n) => rows.filter((row) => NUMBER.test(row[n])).length;
    const right = head.map((_, n) => n > 0 && rows.length > 0 && numbers(n) >= 0.7 * rows.length);
    const cell = (tag, text, n) => make(tag, right[n] ? "number" : text.length > 20 ? "long" : "", text);
    const body = rows.map((row) => make("tr", "", ...row.map((text, n) => cell(n ? "td" : "th", text, n))));
    const whole = make("table", "", make("thead", "", make("tr", "", ...head.map((text, n) => cell("th", text, n)))), make("tbody", "", ...body));
    if (title && fold === undefined) whole.prepend(make("caption", "", title));
    const scroll = make("div", "scroll", whole);
    scroll.tabIndex = 0;
    return scroll;
  }

  function text(block) {  // text between backticks is code
    return make("p", block.class ?? "", ...block.text.split("`").map((part, n) => (n % 2 ? make("code", "", part) : part)));
  }

  const MAKE = {
    text, table, legend: (x) => legend(x.entries), pre: (x) => make("pre", "", x.text),
    plots: (x) => make("div", x.plots.length > 1 ? "two" : "", ...x.plots.map(drawn)),
    list: (x) => make("ul", "", ...x.items.map(([term, means]) => make("li", "", make("b", "", term), `: ${means}`))),
  };

  function block(x) {
    const node = MAKE[x.kind](x);
    if (x.fold === undefined) return node;
    const details = make("details", "", make("summary", "", x.title), node);
    details.open = x.fold === "open";
    return details;
  }

  function section({ title, blocks }) {
    return make("section", "", make("h3", "", title), ...blocks.map(block));
  }

  function article(run, n, several) {
    const name = make("h2", "", run.name);
    name.id = `run-${n}`;
    const head = make("section", "", ...several ? [name] : [], make("p", "note", run.folders),
      ...run.story.map((x) => text({ text: x, class: "story" })), ...run.notes.map((x) => make("p", "note warning", x)));
    return make("article", "", head, ...run.sections.map(section));
  }

  function show(data) {
    document.title = `${data.title}: ftopt report`;
    document.querySelector("h1").textContent = data.title;
    document.getElementById("connection").replaceWith(make("p", "note", data.made));
    const several = data.runs.length > 1, link = (run, n) => {
      const node = make("a", "", run.name);
      node.href = `#run-${n}`;
      return node;
    };
    document.getElementById("report").append(...several ? [make("nav", "", ...data.runs.map(link))] : [],
      ...data.sections.map(section), ...data.runs.map((run, n) => article(run, n, several)));
  }

  const inlined = JSON.parse(document.getElementById("inlined").textContent);
  if (inlined !== null) show(inlined);
  return inlined;
})();
