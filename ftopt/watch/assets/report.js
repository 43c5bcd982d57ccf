/**
 * The report: inlined data, drawn once. Data from a run are shown as text only (`textContent`).
 *
 * A report has `runs` and, if there are several, `sections` that compare them; a section has blocks; a block is a text,
 * a list, a table, a bar, a chart, a timeline, or preformatted text (`ftopt.watch.report.blocks`).
 */
const report = (() => {
  const { make } = charts;
  const NUMBER = /^(|\u2013|below.*|[\u2212-]?\d[\d.,:e+-]*(\s?(%|bytes|[kMGT]B|ms|s|min|h|days).*)?)$/;

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

  /** Parts of a whole: `parts`: [class, text, number, share]. */
  function bar({ label, parts }) {
    const whole = make("div", "parts", ...parts.map(([look, said, number, share]) => {
      const part = make("span", look);
      part.style.flexGrow = number;
      part.title = `${said}: ${number.toLocaleString("en")} (${share})`;
      return part;
    }));
    whole.setAttribute("role", "img");
    whole.setAttribute("aria-label", label);
    return make("figure", "", whole, make("ul", "legend", ...parts.map(([look, said, number, share]) => make("li", "",
      make("i", look), make("b", "", number.toLocaleString("en")), ` ${said} (${share})`))));
  }

  /** The points of a line are one flat list: a value of each axis, and y. */
  function chart({ lines, ...about }) {
    const each = about.axes.length, made = charts.curves(about);
    made.show(lines.map(({ points, ...line }) => {
      const of = (n) => points.filter((_, at) => at % (each + 1) === n);
      return { ...line, xs: about.axes.map((_, n) => of(n)), ys: of(each) };
    }));
    return made.node;
  }

  const MAKE = {
    text, table, bar, chart, timeline: charts.states, pre: (x) => make("pre", "", x.text),
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
    const [wide, rest] = [true, false].map((x) => run.sections.filter((y) => y.wide === x).map(section));
    return make("article", "", head, ...wide, make("div", "columns", ...rest));
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
