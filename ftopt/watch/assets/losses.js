"use strict";
/**
 * The chart of losses, 1000 by 100: a line for each replica from rows with individual losses; from other rows the
 * mean, and a band from the least to the most. `span`: `nowS` and `wholeS`, the time at the right and the time shown;
 * `rowS`: the time of a row. Gaps show rows without a known loss.
 */
function lossLines(rows, columns, span, compare) {
  const at = (name) => columns.indexOf(name);
  const mean = at("loss"), least = at("loss_least"), most = at("loss_most"), each = at("losses");
  const known = rows.filter((row) => row[mean] !== null), last = rows[rows.length - 1];
  if (known.length === 0) return { some: false, apart: false, names: [], paths: [] };
  const low = Math.min(...known.map((row) => row[least])), high = Math.max(...known.map((row) => row[most]));
  const names = [...new Set(known.flatMap((row) => Object.keys(row[each] ?? {})))].sort(compare);

  const across = (t) => (1000 * (1 - (span.nowS - t) / span.wholeS)).toFixed(1);
  const up = (loss) => (high > low ? 96 - (92 * (loss - low)) / (high - low) : 50).toFixed(1);

  /** Points of the rows with a known `value`, in runs without a gap. */
  function runs(value) {
    const found = [];
    let before = -Infinity;
    for (const row of rows) {
      const loss = value(row) ?? null;
      if (loss === null) continue;
      if (row[0] - before > 3 * span.rowS) found.push([[row[0] - span.rowS, loss, row]]);
      found[found.length - 1].push([row[0], loss, row]);
      before = row[0];
    }
    return found;
  }
  const joined = (points) => points.map(([t, loss]) => `${across(t)} ${up(loss)}`).join("L");
  const line = (value) => runs(value).map((points) => `M${joined(points)}`).join("");
  const together = (column) => (row) => (row[each] === null ? row[column] : null);
  const upper = (points) => points.map(([t, , row]) => [t, row[most]]).reverse();
  const band = runs(together(least)).map((points) => `M${joined(points)}L${joined(upper(points))}Z`).join("");
  const paths = [
    { key: "band", title: "from the least to the most", d: band },
    { key: "mean", title: "mean", d: line(together(mean)) },
    ...names.map((name, index) => ({ key: `of ${name}`, title: name, index, d: line((row) => row[each]?.[name]) })),
  ];
  return { some: true, apart: known[known.length - 1][each] !== null, names, paths, low, high, now: last[mean] };
}
