/** The first lines of the live page: whether the job runs well, how far it is, and what failures cost. */
const first = (() => {
  const { duration, figure, moment } = charts;
  const LEVELS = ["training", "waiting", "other", "stalled"];

  function few(number, digits = 3) {
    if (number === 0) return "0";
    if (number >= 100) return Math.round(number).toLocaleString("en");
    return String(Number(number.toPrecision(digits)));
  }

  const whole = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
  const plural = (number, one, many) => `${whole(number)} ${number === 1 ? one : many}`;
  const named = (members) => members.slice(0, 5).map((m) => m.replica).join(", ") + (members.length > 5 ? ` and ${members.length - 5} more` : "");
  const replicas = (members) => `replica${members.length > 1 ? "s" : ""} ${named(members)}`;
  const percent = (part) => `${Number((100 * part).toPrecision(part < 0.1 ? 2 : 3))} %`;
  // The rest has two digits: 64 of 150,000 are not "100 %".
  const allBut = (part) => `${Number((100 - Number((100 * part).toPrecision(2))).toFixed(4))} %`;

  /** How many are connected; "" if the job does not run: its phase says what it waits for, or that it has ended. */
  function connected(x) {
    return x.phase !== "running" ? "" : `${x.connected} of ${plural(x.replicas, "replica", "replicas")} connected`
      + `${x.stalled ? `, ${x.stalled} stalled` : ""}`;
  }

  /** One sentence: whether it runs well; and its class. */
  function verdict(x, late, waitedS) {
    if (x.phase !== "running") return ["", sentence([x.phase])];
    const of = (level) => x.members.filter((m) => m.level === level), away = of("away"), stalled = of("stalled");
    const slow = x.members.filter((m) => m.factor), wrong = x.members.filter((m) => typeof m.loss === "string" && m.level !== "away");
    const down = x.failures.filter((f) => f.to === null).map((f) => x.members.find((m) => m.replica === f.replica));
    const back = down.filter((m) => m && m.level !== "away"), is = (list) => (list.length === 1 ? "is" : "are");
    const found = [];
    if (x.connected === 0) found.push("no replica is connected");
    else if (away.length) {
      const others = x.connected === 1 ? "replica trains" : `${whole(x.connected)} replicas train`;
      found.push(`${replicas(away)} ${is(away)} away; the other ${others} on`);
    }
    if (wrong.length) found.push(`the loss of ${replicas(wrong)} is not finite`);
    if (stalled.length) {
      const [take, them] = stalled.length === 1 ? ["takes", "it"] : ["take", "them"];
      found.push(`${replicas(stalled)} ${take} no step; outer steps are made without ${them}`);
    }
    if (found.length) return ["bad", sentence(found)];
    if (slow.length) found.push(`${replicas(slow)} ${is(slow)} slow`);
    if (late.length) found.push(`an outer step has waited ${duration(waitedS)} for ${replicas(late)}`);
    if (back.length) found.push(`${replicas(back)} ${is(back)} back, and about to train`);
    return found.length ? ["warn", `${sentence(found)} ${connected(x)}.`] : ["well", `Running well: ${connected(x)}, none slow or late.`];
  }

  const sentence = (parts) => `${parts.join("; ").replace(/^./, (c) => c.toUpperCase())}.`;

  /** Seconds to the end, at the pace of the last ten minutes. `rows`: time and inner step first. */
  function left(step, steps, rows) {
    const last = rows[rows.length - 1], begin = rows.find(([t]) => last[0] - t < 600), new_ = last[1] - begin[1];
    return steps !== null && new_ > 0 ? ((steps - step) * (last[0] - begin[0])) / new_ : null;
  }

  /** The large numbers: [name, number, remark, class, part that is done]. */
  function tiles(x, rows, columns, { wholeS, steps }) {
    const at = (row, name) => row[columns.indexOf(name)], sum = (name) => rows.reduce((all, row) => all + at(row, name), 0);
    const last = rows[rows.length - 1], time = LEVELS.reduce((all, name) => all + sum(name), 0);
    const f = x.fragments.reduce((a, b) => (a && a.age_s <= b.age_s ? a : b), null), tries = (key) => x.fragments.reduce((all, y) => all + y[key], 0);
    const step = Math.max(x.inner_step ?? 0, ...x.members.map((m) => m.inner_step ?? 0)), leftS = left(step, steps, rows);
    const loss = at(last, "loss"), low = at(last, "loss_least"), high = at(last, "loss_most"), wrong = at(last, "not_finite");
    const ended = x.failures.filter((f) => f.lost !== null), open = x.failures.filter((f) => f.to === null && f.lost === null);
    const all = ended.reduce((sum, f) => sum + (f.steps ?? 0), x.taken), gone = ended.reduce((sum, f) => sum + f.lost, x.dropped);
    const risk = open.reduce((sum, f) => sum + f.pending, 0), known = open.every((f) => f.pending);  // none, by its last report: it may have taken some since
    const failed = tries("attempts_aborted"), tokens = at(last, "tokens_per_s"), tested = x.evaluations[x.evaluations.length - 1];
    return [
      x.inner_step !== null && ["Inner step", whole(step), steps === null ? `${whole(x.inner_step)} committed`
        : `of ${whole(steps)}${leftS === null || leftS < 1 ? "" : `, about ${duration(leftS)} left`}`, "", steps === null ? null : step / steps],
      (loss !== null || wrong > 0) && ["Loss", wrong > 0 ? "not finite" : figure(loss), loss === null ? `of ${plural(wrong, "replica", "replicas")}`
        : low === high ? "mean of the replicas" : `mean; from ${figure(low)} to ${figure(high)}`, wrong > 0 ? "bad" : ""],
      tested !== undefined && ["Held-out loss", figure(tested[2]), `at inner step ${whole(tested[1])}`],
      x.inner_step !== null && ["Inner steps/s", few(at(last, "steps_per_s")), "of all replicas, committed"],
      tokens > 0 && ["Tokens/s", few(tokens), "of all replicas, in the last 10 s"],
      time > 0 && ["Time spent waiting", percent(sum("waiting") / time), `in outer steps, over the last ${duration(wholeS)}`],
      all > 0 && ["Steps kept", known ? `${risk ? "\u2265 " : ""}${allBut((gone + risk) / all)}` : "not known", `${whole(gone)} of ${whole(all)
      } lost or dropped${open.length ? `, ${known ? whole(risk) : "some"} of ${named(open)} at risk` : ""}`],
      f !== null && ["Outer steps", whole(Math.max(...x.fragments.map((y) => y.version))), `the last ${duration(f.age_s)} ago; ${
        failed ? `${whole(failed)} of ${plural(tries("attempts"), "attempt", "attempts")} failed` : "no attempt failed"}`],
    ].filter(Boolean);
  }

  /** A failure in words; times are seconds since `beganS`, of which `nowS` is the present one. */
  function failure(f, beganS, nowS) {
    const when = `${f.replica} was lost${f.before ? " before" : " at"} ${moment(beganS + f.from)}`;
    const cost = f.lost ? `, and ${plural(f.lost, "inner step", "inner steps")} with it` : "";
    const last = f.pending ? `its last ${plural(f.pending, "inner step", "inner steps")}, in no version,` : "its steps in no version";
    const risk = f.lost === null ? `; ${last} are lost unless it comes back with them` : "";
    if (f.to === null) return `${when}${cost}; down for ${duration(nowS - f.from)}${risk}`;
    if (f.gone) return `${when}${cost}; it did not come back`;
    const took = duration(f.to - f.from);
    return f.lost === null ? `${when}; it trained again ${took} later` : `${when}${cost}; ${took} until its successor's first inner step`;
  }

  return { few, whole, plural, connected, verdict, tiles, failure };
})();
