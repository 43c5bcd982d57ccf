/**
 * What the open page has seen of a job, every two seconds, while the coordinator keeps only the sums: each replica's states,
 * when it was away, and the inner step at a time. It outlives a reload of the page.
 */
const seen = (() => {
  const KEY = "ftopt-seen", GAP_S = 15, MOST_SPANS = 2000, MOST_STEPS = 4000;
  const RESTING = ["standby", "done", "out_of_units"];  // states in which a replica takes no step
  const DOWN = "dead", SHOWN = { training: "training", waiting: "waiting", stalled: "stalled", away: DOWN };
  const jobs = new Map();
  let now = null;

  function restored(history) {
    try {
      const kept = JSON.parse(sessionStorage.getItem(KEY));
      return kept?.history === history ? kept : null;
    } catch {
      return null;
    }
  }

  addEventListener("pagehide", () => {
    try {
      if (now !== null) sessionStorage.setItem(KEY, JSON.stringify(now));
    } catch { /* a private window, or too much */ }
  });

  /** A replica that was away counts as down until it has taken an inner step. */
  function stateOf(lane, m, at) {
    const open = lane.failure === undefined ? undefined : now.failures[lane.failure];
    if (m.level === "away") {
      lane.back = null;
      if (open === undefined) {
        const failure = { replica: m.replica, from: at, to: null, before: at === now.since, of: m.incarnation, pending: m.pending ?? 0 };
        lane.failure = now.failures.push(failure) - 1;
      }
      return DOWN;
    }
    if (open !== undefined && m.incarnation !== open.of) open.lost = open.pending;  // else it has kept them
    if (open === undefined) return SHOWN[m.level] ?? (m.state === "fetching" ? "fetching" : "other");
    lane.back ??= m.inner_step;
    if (!RESTING.includes(m.state) && !(m.inner_step > lane.back)) return DOWN;
    open.to = at;
    delete lane.failure;
    return SHOWN[m.level] ?? "other";
  }

  /** Takes up an answer of `/live`. Times are seconds since 1970, by the coordinator's clock. */
  function take(job) {
    const at = job.began_s + job.recent[0];
    now = jobs.get(job.history) ?? restored(job.history)
      ?? { history: job.history, since: at, steps: [], lanes: {}, failures: [] };
    jobs.set(job.history, now);
    const steps = job.members.map((m) => m.inner_step ?? 0), step = Math.max(job.inner_step ?? 0, ...steps);
    if (job.phase === "running") now.steps.push([at, step]);
    if (now.steps.length > MOST_STEPS) now.steps = now.steps.filter((_, n) => n % 2 === 0);
    const here = new Set(job.members.map((m) => m.replica));
    for (const x of now.failures) {
      if (x.to === null && !here.has(x.replica) && job.replicas === here.size) Object.assign(x, { to: at, gone: true, lost: x.pending });
    }
    for (const m of job.members) {
      const lane = (now.lanes[m.replica] ??= { spans: [] }), { spans } = lane, n = spans.length;
      const state = stateOf(lane, m, at), near = n > 0 && at - spans[n - 2] < GAP_S;
      if (near && spans[n - 1] === state) spans[n - 2] = at;
      else spans.push(near ? spans[n - 2] : at, at, state);
      if (n > 3 * MOST_SPANS) spans.splice(0, n - 3 * MOST_SPANS);
    }
  }

  /** The job's inner step at a time; null before the page was opened. */
  function stepAt(at) {
    const { steps } = now;
    if (!steps.length || at < steps[0][0] - 2) return null;
    let n = steps.findIndex(([t]) => t >= at);
    if (n < 1) n = n < 0 ? steps.length - 1 : 1;
    const [[t0, s0], [t1, s1]] = [steps[n - 1] ?? steps[0], steps[n] ?? steps[0]];
    return t1 > t0 ? Math.max(0, s0 + ((s1 - s0) * Math.min(1, Math.max(0, (at - t0) / (t1 - t0))))) : s1;
  }

  return { take, stepAt, get: () => now };
})();
