"use strict";
/**
 * Charts of the live page and of reports: curves by uPlot, and replicas' states over time as SVG. Their colours are
 * those of the style sheet's classes (`--hue`). Names from a run are shown as text only (`textContent`).
 */
const charts = (() => {
  const CLOCK_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const WIDTH = 1000, PRINTED_PX = 690, NAMED = 12;
  const drawn = new Set();

  function make(name, className = "", ...children) {
    const node = document.createElement(name);
    if (className) node.className = className;
    node.append(...children.filter((x) => x !== null));
    return node;
  }

  function shape(name, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  }

  function button(text, pressed, act) {
    const node = make("button", "", text);
    node.type = "button";
    node.setAttribute("aria-pressed", pressed);
    node.addEventListener("click", act);
    return node;
  }

  // ------------------------------------------------------------ numbers

  const two = (x) => String(x).padStart(2, "0");

  /** Seconds since a start. */
  function clock(s) {
    const all = Math.floor(Math.abs(s)), hours = Math.floor(all / 3600), minutes = Math.floor(all / 60) % 60;
    return (s < -0.5 ? "\u2212" : "") + (hours ? `${hours}:${two(minutes)}` : minutes) + `:${two(all % 60)}`;
  }

  /** A moment, in seconds since 1970, as local time; with the date if it is not today's. */
  function moment(s) {
    const at = new Date(s * 1000), time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
    const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
    return at.toDateString() === new Date().toDateString() ? time : `${day} ${time}`;
  }

  function duration(s) {
    if (s < 120) return `${s < 10 ? Number(s.toPrecision(2)) : Math.round(s)}\u00a0s`;
    if (s < 7200) return `${Math.round(s / 60)}\u00a0min`;
    return s < 172800 ? `${Math.round(s / 3600)}\u00a0h` : `${Math.round(s / 86400)}\u00a0days`;
  }

  function figure(x) {  // a loss: a number, a word, or null
    if (typeof x !== "number") return x === null ? "-" : x.replace("nan", "NaN");
    return x && (Math.abs(x) < 1e-4 || Math.abs(x) >= 1e4) ? x.toExponential(2) : x.toPrecision(4);
  }

  /** Of an axis: "clock", seconds since a start; "at", moments; "s", seconds; else numbers. */
  function said(x, kind, exact) {
    if (kind === "clock") return clock(x);
    if (kind === "at") return exact ? moment(x) : moment(x).slice(-8);
    const text = Number(x.toPrecision(exact ? 5 : 8)).toLocaleString("en", { maximumSignificantDigits: 8 });
    return kind === "s" ? `${text}\u00a0s` : text;
  }

  function labels(values, kind) {
    const texts = values.map((x) => said(x, kind)), minutes = kind === "at" && texts.every((x) => x.endsWith(":00"));
    return minutes ? texts.map((x) => x.slice(0, -3)) : texts;
  }

  function ticks(least, most, count, kind, log) {
    if (log && most > 6 * least) {
      const found = [];
      for (let power = 10 ** Math.floor(Math.log10(least)); power <= most; power *= 10) {
        found.push(...(most > 1e4 * least ? [power] : [power, 2 * power, 5 * power]));
      }
      return found.filter((x) => x >= least && x <= most);
    }
    const rough = (most - least) / count, power = 10 ** Math.floor(Math.log10(rough));
    const timed = (kind === "clock" || kind === "at") && rough >= 0.99;
    const step = timed ? CLOCK_S.find((x) => x >= rough) ?? 86400 * Math.ceil(rough / 86400)
      : power * [1, 2, 2.5, 5, 10].find((x) => power * x >= rough * 0.999);
    const off = kind === "at" ? -60 * new Date().getTimezoneOffset() : 0, found = [];
    for (let n = Math.ceil((least + off) / step - 1e-9); n * step <= most + off + step * 1e-9; n += 1) found.push(n * step - off);
    return found.length < 2 && count < 64 ? ticks(least, most, 2 * count, kind, log) : found;
  }

  // ------------------------------------------------------------ curves

  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  /**
   * A chart. `axes`: [title, kind] of each x to choose from, and [from, to] where they are fixed; `y`: its kind; `scales`:
   * whether one may choose a logarithmic scale, and leave out values far above all others. `show` takes the lines:
   * `name`, `hue` (a class), `look` (line, dots, dotted, stepped, most, least), `xs` (a list for each axis), `ys`.
   * Lines "most" and "least", one after the other, are the edges of a band.
   */
  function curves({ label, axes, y = "", scales = false, height = 280, axis = 0 }) {
    let lines = [], log = false, whole = false, cut = null, plot = null, key = "", zoomed = false;
    const off = new Set(), swatches = new Map();
    const tip = make("div", "tip"), area = make("div", "chart"), choices = make("div", "choices"), keys = make("div", "legend");
    const node = make("figure", "curves", make("div", "titled", keys, choices), area);
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", `${label}; the arrow keys show its values`);
    tip.setAttribute("role", "status");
    tip.hidden = true;

    const css = (name) => getComputedStyle(node).getPropertyValue(name);
    const hue = (line) => getComputedStyle(swatches.get(line.name)).getPropertyValue("--hue");
    const fixed = () => axes[axis][2];

    function sorted() {
      for (const line of lines) {
        const xs = line.xs[axis], order = xs.map((_, n) => n).sort((a, b) => xs[a] - xs[b]);
        line.x = order.map((n) => xs[n]);
        line.y = order.map((n) => (log && !(line.ys[n] > 0) ? null : line.ys[n]));
      }
      const joined = lines.length ? uPlot.join(lines.map((line) => [line.x, line.y])) : [[]];
      for (const ys of joined.slice(1)) {  // a gap reaches from a line's last value before it to the next one
        ys.forEach((value, at) => {
          if (value !== null) return;
          for (let n = at - 1; ys[n] === undefined && n >= 0; n -= 1) ys[n] = null;
          for (let n = at + 1; ys[n] === undefined && n < ys.length; n += 1) ys[n] = null;
        });
      }
      return joined;
    }

    /** The range of y: a few values far beyond all others, such as those of the first steps, do not flatten the rest. */
    function heights(u, least, most) {
      if (least === null) return [0, 1];
      cut = null;
      if (scales && !whole && !zoomed) {
        const [from, to] = [u.data[0][0], u.data[0][u.data[0].length - 1]], after = from + 0.1 * (to - from);
        const later = lines.filter((line) => !off.has(line.name))
          .flatMap((line) => line.y.filter((v, n) => v !== null && line.x[n] >= after)).sort((a, b) => a - b);
        const usual = later[Math.floor(0.98 * (later.length - 1))], last = later[later.length - 1];
        const top = last - least > 3 * (usual - least) ? least + 1.5 * (usual - least) : last;
        if (later.length > 20 && top > least && most - least > 1.3 * (top - least)) [cut, most] = [most, top];
      }
      if (log && least > 0) return most > least ? [least * (least / most) ** 0.04, most * (most / least) ** 0.04] : [least / 2, most * 2];
      const margin = most > least ? 0.04 * (most - least) : Math.abs(most) / 10 || 0.5;
      return [y === "" ? least - margin : 0, most + margin];
    }

    function build() {
      plot?.destroy();
      plot = null;
      if (!area.clientWidth) return;  // not shown yet
      const kind = axes[axis][1], look = (line) => (line.look === "dots" || line.look === "dotted");
      const bands = lines.flatMap((line, n) => (line.look === "most" ? [{ series: [n + 1, n + 2], fill: () => css("--fill") }] : []));
      const axisOf = (scale, size, space, says, logs) => ({
        scale, size, stroke: () => css("--soft"), font: "11.5px system-ui, sans-serif", gap: 6, ticks: { show: false },
        grid: { stroke: () => css("--line"), width: 1 }, filter: (u, splits) => splits,
        splits: (u, at, least, most) => {
          const room = scale === "x" ? u.width - 60 : u.height - 36;
          return ticks(least, most, Math.max(2, Math.floor(room / space)), says, logs);
        },
        values: (u, splits) => labels(splits, says),
      });
      plot = new uPlot({
        width: area.clientWidth, height, legend: { show: false }, padding: [10, 16, 0, 0],
        scales: {
          x: { time: false, range: (u, from, to) => {
            const all = u.data[0];
            if (!all.length) return fixed() ?? [0, 1];
            if (fixed() && from === all[0] && to === all[all.length - 1]) return fixed();
            return from < to ? [from, to] : [from - 0.5, to + 0.5];
          } },
          y: { distr: log ? 3 : 1, range: heights },
        },
        axes: [axisOf("x", 24, 90, kind), axisOf("y", (u, texts) => 14 + 6.5 * Math.max(3, ...(texts ?? []).map((x) => x.length)), 44, y, log)],
        bands, cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        series: [{}, ...lines.map((line, at) => ({
          show: !off.has(line.name), width: line.look === "dotted" ? 2.4 : line.hue.includes("thin") ? 0.8 : 1.6,
          stroke: () => (line.look === "most" || line.look === "least" ? "#0000" : hue(line)),
          ...(line.look === "dots" ? { paths: () => null } : {}),
          ...(line.look === "stepped" ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
          points: {
            show: () => look(line) || lines[at].ys.length === 1, size: line.look === "dots" ? 4 : 6,
            stroke: () => hue(line), fill: () => hue(line),
          },
        }))],
        hooks: { setCursor: [point], setSelect: [(u) => { zoomed ||= u.select.width > 0; }], draw: [choose] },
      }, sorted(), area);
      plot.over.addEventListener("dblclick", () => { zoomed = false; });
      plot.over.append(tip);
    }

    function point(u) {
      tip.hidden = !(u.cursor.left >= 0) || !lines.length;
      if (tip.hidden) return;
      const x = u.posToVal(u.cursor.left, "x"), near = 0.03 * (u.scales.x.max - u.scales.x.min), found = new Map();
      for (const line of lines) {
        if (off.has(line.name) || !line.x.length) continue;
        const at = nearest(line.x, x), away = Math.abs(line.x[at] - x);
        const name = line.look === "most" || line.look === "least" ? `${line.look} of all` : line.name;
        if (line.y[at] === null || away > near || away >= (found.get(name)?.away ?? Infinity)) continue;
        found.set(name, { away, line, at: line.x[at], value: line.y[at] });
      }
      const first = [...found.values()].reduce((a, b) => (a && a.away <= b.away ? a : b), null);
      const rows = [...found].slice(0, NAMED).map(([name, { line, value }]) =>
        make("div", "", make("i", line.hue), name, make("b", "", y ? said(value, y, true) : figure(value))));
      tip.replaceChildren(make("div", "", `${axes[axis][0]} `, make("b", "", said(first === null ? x : first.at, axes[axis][1], true))), ...rows,
        ...(found.size > NAMED ? [make("div", "", `and ${found.size - NAMED} more`)] : []));
      const right = u.cursor.left > u.over.clientWidth / 2;
      tip.style.left = right ? "auto" : `${u.cursor.left + 14}px`;
      tip.style.right = right ? `${u.over.clientWidth - u.cursor.left + 14}px` : "auto";
    }

    /** Draws the buttons, if what they say has changed. */
    function choose() {
      const now = JSON.stringify([axis, log, whole, cut, zoomed]);
      if (choices.dataset.now === now) return;
      choices.dataset.now = now;
      const again = (change) => () => { change(); zoomed = false; build(); choices.querySelectorAll("button")[0]?.blur(); };
      const group = (named, ...buttons) => {
        const found = make("span", "", ...buttons);
        found.setAttribute("role", "group");
        found.setAttribute("aria-label", named);
        return found;
      };
      choices.replaceChildren(
        ...(zoomed ? [button("Show all", false, again(() => {}))] : []),
        ...(cut !== null || whole ? [button(cut === null ? "Hide the highest" : `Show up to ${figure(cut)}`, false,
          again(() => { whole = !whole; }))] : []),
        ...(scales ? [group("Scale", button("Linear", !log, again(() => { log = false; })), button("Log", log, again(() => { log = true; })))] : []),
        ...(axes.length > 1 ? [group("Horizontal axis", ...axes.map(([title], n) =>
          button(title, n === axis, again(() => { axis = n; chosen = true; }))))] : []),
      );
    }
    let chosen = false;

    function legend() {
      const names = new Map(lines.filter((line) => line.look !== "least").map((line) => [line.name, line.hue]));
      swatches.clear();
      keys.replaceChildren(...[...names].map(([name, look]) => {
        const swatch = make("i", look), entry = button("", !off.has(name), () => {
          if (!off.delete(name)) off.add(name);
          entry.setAttribute("aria-pressed", !off.has(name));
          lines.forEach((line, n) => { if (line.name === name) plot?.setSeries(n + 1, { show: !off.has(name) }); });
        });
        entry.append(swatch, name);
        swatches.set(name, swatch);
        return entry;
      }));
      for (const line of lines) if (!swatches.has(line.name)) swatches.set(line.name, swatches.values().next().value);
    }

    area.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (event.key === "Escape") plot?.setCursor({ left: -10, top: -10 });
      if (by === undefined || !plot || !plot.data[0].length) return;
      event.preventDefault();
      const last = plot.data[0].length - 1, at = Math.min(last, Math.max(0, (plot.cursor.idx ?? (by > 0 ? -1 : last + 1)) + by));
      plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: 0 });
    });
    new ResizeObserver(() => {
      if (plot === null) build(); else if (area.clientWidth && area.clientWidth !== plot.width) plot.setSize({ width: area.clientWidth, height });
    }).observe(area);
    drawn.add({ redraw: () => plot?.redraw(false), size: (width) => plot?.setSize({ width: width ?? area.clientWidth, height }) });

    return {
      node,
      /** Shows these lines; `prefer`: the axis while the reader has chosen none. */
      show(next, prefer = axis) {
        lines = next;
        const now = JSON.stringify([lines.map((line) => [line.name, line.hue, line.look]), chosen ? axis : prefer]);
        if (!chosen) axis = prefer;
        if (now !== key || plot === null) {
          key = now;
          legend();
          build();
          return;
        }
        plot.setData(sorted(), !zoomed);
        if (zoomed) plot.redraw();
      },
      fix(span) { axes.forEach((x, n) => { x[2] = span[n]; }); },
    };
  }

  // ------------------------------------------------------------ states over time

  /**
   * What each replica was doing: `rows`: [name, spans] with spans as flat [start, stop, state]; `states`: state -> label;
   * `span`: [from, to, kind]; `marks`: [class, times] in a row of their own, `last`; `faults`: [time, row, text].
   */
  function states({ label, rows, states, span, marks = [], last = null, faults = [], entries = [] }) {
    const [from, to, kind] = span, names = rows.map(([name]) => name).concat(last === null ? [] : [last]);
    const each = Math.max(6, Math.min(22, 640 / Math.max(1, rows.length))), height = each * names.length;
    const part = (t) => Math.min(1, Math.max(0, (t - from) / (to - from || 1))), across = (t) => (WIDTH * part(t)).toFixed(1);
    const picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
    const at = ticks(from, to > from ? to : from + 1, innerWidth < 560 ? 3 : 6, kind);
    picture.append(shape("path", { d: at.map((t) => `M${across(t)} 0v${height}`).join(""), class: "grid" }));
    rows.forEach(([, spans], row) => {
      const paths = new Map();
      for (let n = 0; n < spans.length; n += 3) {
        const [start, stop, state] = spans.slice(n, n + 3), least = state === "dead" ? 2 : 0.1;
        if (stop < from) continue;
        const right = Math.max(across(stop), +across(start) + least), [top, bottom] = [each * (row + 0.12), each * (row + 0.88)];
        const d = `M${across(start)} ${top}H${right}V${bottom}H${across(start)}z`;
        paths.set(state, (paths.get(state) ?? "") + d);
      }
      for (const [state, d] of paths) picture.append(shape("path", { d, class: `block ${state}` }));
    });
    for (const [look, times] of marks) {
      const d = times.map((t) => `M${across(t)} ${each * (rows.length + 0.2)}v${each * 0.7}`).join("");
      picture.append(shape("path", { class: `mark ${look}`, d }));
    }
    for (const [t, row] of faults) picture.append(shape("path", { class: "fault", d: `M${across(t)} ${each * (row + 0.5)}h0` }));
    const tip = make("div", "tip"), area = make("div", "area", picture, tip);
    tip.hidden = true;
    area.style.height = `${height}px`;
    area.addEventListener("pointerleave", () => { tip.hidden = true; });
    area.addEventListener("pointermove", (event) => {
      const box = area.getBoundingClientRect(), where = (event.clientX - box.left) / box.width;
      const row = Math.floor((names.length * (event.clientY - box.top)) / box.height), t = from + where * (to - from);
      const spans = rows[row]?.[1] ?? [], n = spans.findIndex((start, i) => i % 3 === 0 && start <= t && t <= spans[i + 1]);
      const fault = faults.find((x) => x[1] === row && Math.abs(part(x[0]) - where) < 0.01);
      const [start, stop, state] = n < 0 ? [] : spans.slice(n, n + 3);
      const text = n < 0 ? "" : `: ${states[state]} for ${duration(stop - start)}, from ${said(start, kind, true)} to ${said(stop, kind, true)}`;
      tip.hidden = names[row] === undefined;
      tip.replaceChildren(make("b", "", names[row] ?? ""), text || ` at ${said(t, kind, true)}`, ...(fault ? [make("div", "", fault[2])] : []));
      tip.style.top = `${each * (row + 1) + 4}px`;
      tip.style.left = where > 0.5 ? "auto" : `${100 * where}%`;
      tip.style.right = where > 0.5 ? `${100 * (1 - where)}%` : "auto";
    });
    const label_of = (side, where, text) => {
      const node = make("span", "", text);
      node.style[side] = `${100 * where}%`;
      return node;
    };
    const sparse = each >= 12 ? 1 : 4, short = (text) => (text.length > 14 ? `${text.slice(0, 13)}\u2026` : text);
    const left = names.map((name, n) => label_of("top", (n + 0.5) / names.length, n % sparse ? "" : short(name)));
    const below = labels(at, kind).map((text, n) => label_of("left", part(at[n]), text));
    const whole = make("div", "axes", make("div", "y", ...left), area, make("div", "x", ...below));
    whole.style.setProperty("--labels", `${Math.max(2, ...left.map((node) => node.textContent.length))}ch`);
    return make("figure", "", make("p", "legend", ...entries.map(([look, text]) => make("span", "", make("i", look), text))), whole);
  }

  // ------------------------------------------------------------ colours of the screen, and of paper

  const redraw = () => drawn.forEach((x) => x.redraw());
  const paper = (printed) => () => {
    document.documentElement.classList.toggle("paper", printed);
    drawn.forEach((x) => x.size(printed ? PRINTED_PX : undefined));
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  addEventListener("beforeprint", paper(true));
  addEventListener("afterprint", paper(false));
  return { make, button, moment, duration, figure, curves, states };
})();
