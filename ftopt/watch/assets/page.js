// The live page: asks /live every two seconds and shows the answer. Data from replicas are shown as text only.
if (report === null) (() => {
  const { make, button, moment, duration, figure } = charts, { few, whole, plural, connected } = first;
  const POLL_MS = 2000, GIVE_UP_MS = 8000, LATE_S = 10;
  const COUNTS = [["outer_steps", "outer step", "outer steps"], ["aborts", "failed attempt", "failed attempts"],
    ["lost", "lost connection", "lost connections"], ["joins", "join", "joins"], ["stalls", "outer step without a stalled replica", "outer steps without a stalled replica"],
    ["deaths", "earlier incarnation replaced or removed", "earlier incarnations replaced or removed"]];
  const LEVELS = [["training", "training", "training"], ["waiting", "waiting", "waiting"], ["other", "in other states", "l3"],
    ["stalled", "stalled", "struck"], ["away", "away", "dead"]];
  const LANES = { training: "training", waiting: "waiting in an outer step", fetching: "fetching the state", other: "in another state",
    stalled: "stalled", dead: "down" };
  const HUES = 8;
  const STATES = {
    training: "It takes inner steps.", waiting: "It has proposed, and waits for its peers in an outer step.",
    fetching: "It fetches the job's state.", evaluating: "It evaluates; it takes no inner step meanwhile.",
    standby: "A spare: it holds the job's state, and trains when a replica is lost.",
    connected: "It waits until the job runs.", done: "It is at the job's end.", out_of_units: "Its data are used up.",
    stalled: "Its training thread takes no step although an outer step waits; the step is made without it.",
    slow: "Its steps take so many times as long as is usual in the job; outer steps call it in early, or do without it.",
    away: "It is not connected: dead, or cut off. It may come back.",
  };
  const $ = (id) => document.getElementById(id);
  const given = new URLSearchParams(location.hash.slice(1));
  const keep = { get: (key) => { try { return sessionStorage.getItem(key); } catch { return null; } },
    set: (key, value) => { try { sessionStorage.setItem(key, value); } catch { /* a private window */ } } };
  let token = given.get("token") ?? keep.get("ftopt-token") ?? "";
  let job = given.get("job"), range = 0, history = "", count = 0, told = -1, known = [], lanes = {}, lanesTo = 0, evaluations = [], tested = 0, hues = new Map();
  let answeredAt = null, timer = 0, asked = 0, awaited = new Map();
  const steps = Number(given.get("steps")) || null;  // where the job ends, if the address says it

  if (given.has("token")) {  // removed from the address bar and the browser's history
    keep.set("ftopt-token", token);
    remember();
  }
  $("where").textContent = location.host;

  function remember() {
    const hash = new URLSearchParams({ ...(job === null ? {} : { job }), ...(steps === null ? {} : { steps }) });
    window.history.replaceState(null, "", location.pathname + (hash.size ? `#${hash}` : ""));
  }

  // ------------------------------------------------------------ elements

  function setText(node, text) {
    if (node.textContent !== String(text)) node.textContent = text;
  }

  /** Updates the rows of a table, or the entries of a list, to show `items`: one each, by key, in their order. */
  function fill(parent, items, key, make, update) {
    const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
    items.forEach((item, index) => {
      const name = String(key(item));
      let node = old.get(name);
      if (node === undefined) {
        node = make(item);
        node.dataset.key = name;
      }
      old.delete(name);
      if (parent.children[index] !== node) parent.insertBefore(node, parent.children[index] ?? null);
      update(node, item);
    });
    for (const node of old.values()) node.remove();
  }

  function cells(head, ...classes) {
    const row = document.createElement("tr");
    const first = make("th", "", head);
    first.scope = "row";
    row.append(first, ...classes.map((name) => make("td", name)));
    return row;
  }

  function put(row, ...texts) {
    texts.forEach((text, index) => setText(row.children[index], text));
  }

  function note(id, text) {
    $(id).hidden = text === "";
    setText($(id), text);
  }

  // ------------------------------------------------------------ what is shown

  function showJobs(jobs, current) {
    $("jobs").hidden = jobs.length < 2;
    $("none").hidden = jobs.length > 0;
    $("data").hidden = jobs.length === 0;
    fill($("jobs"), jobs, (x) => x.job, (x) => {
      const found = button("", false, () => choose(x.job));
      found.removeAttribute("aria-pressed");
      found.append(make("span"), make("small"));
      return found;
    }, (found, x) => {
      put(found, x.job, connected(x) || x.phase.split(":")[0]);
      found.setAttribute("aria-current", x.job === current ? "true" : "false");
    });
  }

  /** How long the outer step under way has waited for each replica: it is normal for some seconds. */
  function waits(x) {
    const now = Date.now() / 1000, still = new Map();
    for (const m of x.members) if (m.round === "awaited") still.set(m.replica, awaited.get(m.replica) ?? now);
    awaited = still;
    return x.members.filter((m) => m.round === "awaited" && now - still.get(m.replica) >= LATE_S);
  }

  function showJob(x, rows, columns, wholeS) {
    const late = waits(x), since = late.map((m) => awaited.get(m.replica));
    const [look, said] = first.verdict(x, late, Date.now() / 1000 - Math.min(...since));
    setText($("job"), x.job);
    setText($("verdict"), said);
    $("verdict").className = look;
    document.title = `${x.job}${x.inner_step === null ? `: ${x.phase.slice(0, 40)}` : `, inner step ${whole(x.inner_step)}`} - ftopt`;
    showTiles(first.tiles(x, rows, columns, { wholeS, steps }));
    showRounds(x);
    showMembers(x, late);
  }

  function showTiles(tiles) {
    fill($("tiles"), tiles, ([name]) => name, ([name]) => {
      const bar = make("progress"), tile = make("div", "", make("dt", "", name), make("dd", "", make("b"), bar, make("span", "note")));
      bar.setAttribute("aria-label", name);
      return tile;
    }, (tile, [, value, about, className, part]) => {
      const [number, bar, note] = tile.lastChild.children;
      tile.className = className ?? "";
      put(tile.lastChild, value);
      setText(note, about);
      bar.hidden = typeof part !== "number";
      bar.value = part ?? 0;
    });
  }

  function showRounds(x) {
    $("rounds").hidden = x.fragments.length === 0;
    $("rounds").className = x.fragments_in_all === 1 ? "single" : "";
    fill($("rounds").tBodies[0], x.fragments, (f) => f.fragment,
      () => cells("number", "number", "", "number", "number"),
      (row, f) => put(row, f.fragment, whole(f.version), f.doing, duration(f.age_s),
        `${whole(f.attempts_aborted)} of ${whole(f.attempts)}`));
    const more = x.fragments_in_all - x.fragments.length;
    note("more-rounds", x.fragments.length === 0 ? `None while the job does not run${
      x.last_version === null ? "" : `; the last version is ${whole(x.last_version)}`}.`
      : more > 0 ? `${plural(more, "more fragment", "more fragments")}: nothing under way there.` : "");
  }

  const byName = new Intl.Collator("en", { numeric: true });

  function showMembers(x, late) {
    const members = [...x.members].sort((a, b) => byName.compare(a.replica, b.replica));
    const speed = (m) => (m.step_s > 0 && m.level !== "away" ? 1 / m.step_s : 0);
    const fastest = Math.max(...members.map(speed), 1e-9);
    $("members").className = members.every((m) => m.loss === null) ? "no-losses" : "";
    fill($("members").tBodies[0], members, (m) => m.replica,
      () => cells("name", "state", "number", "number meter", "number loss", "number", "number", "number"),
      (row, m) => {
        const round = m.round !== "awaited" || late.includes(m) ? m.round : "";
        row.className = `${m.level} ${round} ${m.factor ? "slow" : ""}`;
        const [low, high] = m.versions;
        const state = m.factor ? `${m.state}, ${few(m.factor, 2)} times` : m.state;
        put(row, m.replica, round ? `${state}, ${round}` : state, m.inner_step === null ? "-" : whole(m.inner_step), speed(m) ? few(speed(m)) : "-",
          m.level === "away" ? "-" : figure(m.loss), low === undefined ? "-" : low === high ? whole(low) : `${whole(low)} to ${whole(high)}`, m.incarnation || "-",
          m.waited === null ? "-" : duration(m.waited[0]));
        row.children[7].title = m.waited?.[1] ? `for ${m.waited[1]}: ${duration(m.waited[2])}` : "";
        row.children[1].title = STATES[m.state] ?? "";
        row.children[0].className = hues.has(m.replica) ? `name of l${hues.get(m.replica)}` : "name";
        row.children[4].className = typeof m.loss === "string" ? "number loss bad" : "number loss";
        row.children[3].style.backgroundSize = `${(100 * speed(m)) / fastest}% 1.4em`;
      });
    const more = x.replicas - members.length;
    note("more-members", more > 0 ? `${plural(more, "more replica is", "more replicas are")} not shown; those that a `
      + "round waits for, that are stalled, slow or not connected come first." : x.replicas === 0 ? "None is connected." : "");
  }

  function showEvents(events) {
    const list = $("events");
    list.replaceChildren(...[...events].reverse().map((e) => {
      const item = make("li"), at = make("time", "", moment(e.at_s));
      at.dateTime = new Date(e.at_s * 1000).toISOString();
      item.append(at, make("span", "", e.times > 1 ? `${e.text} (${e.times} times in a row)` : e.text));
      return item;
    }));
    $("no-events").hidden = events.length > 0;
  }

  // ------------------------------------------------------------ charts

  const losses = charts.curves({ label: "losses", axes: [["time", "at", null], ["inner step", "", null]], scales: true, height: 300 });
  const speed = charts.curves({ label: "inner steps per second", axes: [["time", "at", null]], y: "steps", height: 180 });
  const levels = charts.curves({ label: "replicas by state", axes: [["time", "at", null]], y: "replicas", height: 180 });
  $("losses").append(losses.node);
  $("numbers").append(speed.node, levels.node);

  function spans(answer) {  // seconds of a row, and rows of a whole chart
    return [[answer.sample_s, 300], [answer.sample_s * 30, 360], [answer.sample_s * 450, 384]][range];
  }

  /** Returns the rows shown, and the seconds that they span. */
  function showCharts(answer) {
    const x = answer.job, [rowS, keepRows] = spans(answer);
    const rows = [...known, x.recent];  // rows come with a delay
    const nowS = x.recent[0], wholeS = Math.min(rowS * keepRows, Math.max(nowS, 60));  // a young job fills the chart
    const to = x.began_s + nowS, from = to - wholeS;
    fill($("ranges"), answer.ranges.map((text, index) => ({ text, index })), (r) => r.index,
      (r) => button(r.text, false, () => { range = r.index; forget(); poll(); }),
      (found, r) => found.setAttribute("aria-pressed", r.index === range ? "true" : "false"));
    for (const chart of [losses, speed, levels]) chart.fix([[from, to]]);
    const at = (name) => answer.columns.indexOf(name), level = (name, text, hue, look = "stepped") => ({ name: text, hue, look,
      xs: [rows.map((row) => x.began_s + row[0])], ys: rows.map((row) => row[at(name)]) });
    speed.show([level("steps_per_s", "inner steps per second, committed by all replicas", "l0")]);
    const present = (ys) => ys.map((v, n) => (v || ys[n - 1] || ys[n + 1] ? v : null));  // no line where there is none
    const shown = LEVELS.map(([name, text, hue]) => level(name, text, hue)).filter((line) => line.ys.some((v) => v > 0));
    levels.show(shown.map((line) => ({ ...line, ys: present(line.ys) })));
    const sums = COUNTS.map(([name, one, many]) => plural(rows.reduce((all, row) => all + row[at(name)], 0), one, many));
    setText($("counts"), `In the last ${duration(wholeS)}: ${sums.join(", ")}.`);
    showLosses(answer, rows, rowS);
    showLanes(x, to);
    return [rows, wholeS];
  }

  function showLosses(answer, rows, rowS) {
    const { members, began_s } = answer.job, at = (name) => answer.columns.indexOf(name), each = at("losses");
    const known = rows.filter((row) => row[at("loss")] !== null), apart = known.length > 0 && known[known.length - 1][each] !== null;
    const names = apart ? [...new Set(known.flatMap((row) => Object.keys(row[each] ?? {})))].sort(byName.compare) : [];
    hues = new Map(names.map((name, index) => [name, index % HUES]));
    /** A line; a gap where no row has a value for a while. */
    const line = (name, hue, look, value) => {
      const xs = [[], []], ys = [];
      let before = -Infinity;
      rows.forEach((row) => {
        const loss = value(row) ?? null, [t, step] = [began_s + row[0], row[1]];
        if (loss === null) return;
        if (row[0] - before > 3 * rowS && ys.length) [xs[0], xs[1], ys].forEach((list, k) => list.push([t - 1, step - 1e-6, null][k]));
        xs[0].push(t);
        xs[1].push(step);
        ys.push(loss);
        before = row[0];
      });
      return { name, hue, look, xs, ys };
    };
    const together = (column) => (row) => (row[each] === null ? row[at(column)] : null);
    const lines = apart ? names.map((name) => line(name, `l${hues.get(name)}`, "line", (row) => row[each]?.[name]))
      : [line("mean", "l0", "line", (row) => row[at("loss")]),
        ...["most", "least"].map((look) => line("least to most", "band", look, together(`loss_${look}`)))];
    const shown = evaluations.filter(([t]) => t >= rows[0][0]);
    if (shown.length) lines.push({ name: "held-out", hue: "held", look: "dotted", xs: [shown.map(([t]) => began_s + t), shown.map((e) => e[1])],
      ys: shown.map((e) => e[2]) });
    $("losses").hidden = known.length === 0 && shown.length === 0;
    if (!$("losses").hidden) losses.show(lines, 1);
    note("about-losses", known.length ? apart ? "" : "More than 8 replicas: their mean, and a band from the least to the most."
      : `No loss in the time shown. A replica reports it with optimizer.log(loss=loss) before step(); the page takes it every ${
        answer.sample_s} s.`);
  }

  /** The replica for which others have waited longest. */
  function awaitedMost(members) {
    const sums = new Map();
    for (const [, whom, s] of members.map((m) => m.waited ?? [])) if (whom) sums.set(whom, (sums.get(whom) ?? 0) + s);
    const [whom, s] = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0]);
    return s ? ` Replicas have waited longest for ${whom}, ${duration(s)} in all.` : "";
  }

  function showLanes(x, to) {
    const names = Object.keys(lanes).sort(byName.compare), from = x.began_s;
    const used = new Set(names.flatMap((name) => lanes[name].filter((_, n) => n % 3 === 2)));
    $("lanes").hidden = names.length === 0;
    if (!$("lanes").matches(":hover")) $("lanes").replaceChildren(charts.states({  // else what one points at would vanish
      label: "timeline of the replicas", rows: names.map((name) => [name, lanes[name]]), states: LANES, span: [from, Math.max(to, from + 30), "at"],
      entries: Object.entries(LANES).filter(([state]) => used.has(state)).map(([state, text]) => [`block ${state}`, text]),
    }));
    note("about-lanes", names.length ? `Since ${moment(from)}, when the coordinator began with the job.${
      used.has("dead") ? " Down: from the loss of a replica to its first inner step." : ""}${awaitedMost(x.members)}` : "None is connected.");
    fill($("failures"), [...x.failures].reverse(), (f) => `${f.replica} ${f.from}`, () => make("li"), (item, f) => {
      item.className = f.to === null ? "now" : "";
      setText(item, first.failure(f, from, to - from));
    });
    note("about-failures", x.failures.length ? "" : "None so far.");
  }

  // ------------------------------------------------------------ asking

  function choose(name) {
    job = name;
    remember();
    forget();
    poll();
  }

  function forget() {
    history = "";
    known = [];
    count = lanesTo = tested = 0;
    told = -1;
    lanes = {};
    evaluations = [];
  }

  function take(answer) {
    const x = answer.job;
    showJobs(answer.jobs, x === null ? null : x.job);
    if (x === null) {
      document.title = "ftopt";
      forget();
      return;
    }
    job ??= x.job;  // the page keeps it when it ends
    if (x.history !== history) forget();  // another job, or a restarted coordinator
    history = x.history;
    count = x.count;
    known = known.concat(x.rows).slice(-spans(answer)[1]);
    lanes = Object.fromEntries(Object.entries(x.lanes).map(([name, spans]) => [name, joined(lanes[name] ?? [], spans, x.began_s)]));
    lanesTo = Math.floor(x.recent[0]);
    evaluations = x.tests ?? evaluations;
    tested = x.tested;
    x.evaluations = evaluations;
    const [rows, wholeS] = showCharts(answer);
    showJob(x, rows, answer.columns, wholeS);
    if (x.events !== null) showEvents(x.events);
    told = x.told;
  }

  /** A lane's spans with its newer ones, which begin with the one that has gone on; as flat [start, stop, state]. */
  function joined(old, spans, beganS) {
    const moved = spans.map((value, n) => (n % 3 === 2 ? value : beganS + value));
    const kept = old.findIndex((start, n) => n % 3 === 0 && start >= moved[0]);
    return (kept < 0 ? old : old.slice(0, kept)).concat(moved);
  }

  function broken(why) {
    const since = answeredAt === null ? "no answer yet" : `no answer since ${moment(answeredAt / 1000)}`;
    $("connection").className = "broken";
    setText($("connection"), `${since} (${why}); trying again`);
    $("data").classList.add("stale");
    if (answeredAt === null) return;
    document.title = `${since} - ftopt`;
    $("verdict").className = "warn";
    setText($("verdict"), `The coordinator has not answered since ${moment(answeredAt / 1000)}; this was the state then. If the job has ended, `
      + "the report in its folder shows it whole.");
  }

  function logIn(refused) {
    setText($("refused"), refused);
    setText($("connection"), "a token is needed");
    $("connection").className = "broken";
    for (const id of ["data", "jobs", "none"]) $(id).hidden = true;
    if ($("login").hidden) {
      $("login").hidden = false;
      $("token").focus();
    }
  }

  async function poll() {
    clearTimeout(timer);
    const mine = ++asked;
    if (/[^!-~]/.test(token)) {
      logIn("A token has no blanks and no characters beyond ASCII.");
      return;
    }
    const query = new URLSearchParams({ range, history, after: count, told: Math.max(told, 0), tests: tested, lanes: lanesTo });
    if (job !== null) query.set("job", job);
    let again = true, data = null;
    try {
      const answer = await fetch(`live?${query}`, {
        headers: token ? { Authorization: `Bearer ${token}` } : {},
        cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(GIVE_UP_MS),
      });
      if (mine !== asked) return;
      if (answer.status === 401) {
        again = false;
        logIn(token ? "The coordinator does not accept this token." : "");
        return;
      }
      if (answer.status === 410) location.reload();  // the run is over, and its report is here now (--keep)
      if (!answer.ok) throw new Error(`it answers ${answer.status}`);
      data = await answer.json();
      if (mine !== asked) return;
      answeredAt = Date.now();
      $("login").hidden = true;
      $("data").classList.remove("stale");
      $("connection").className = "";
      setText($("connection"), `live, ${moment(answeredAt / 1000)}`);
      take(data);
    } catch (error) {
      if (mine !== asked) return;
      broken(error.name === "TimeoutError" ? "it takes too long" : error.name === "TypeError" && data === null ? "not reachable"
        : error.message);
    } finally {
      if (mine === asked && again && !document.hidden) timer = setTimeout(poll, POLL_MS);
    }
  }

  $("login").addEventListener("submit", (event) => {
    event.preventDefault();
    token = $("token").value.trim();
    keep.set("ftopt-token", token);
    poll();
  });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && $("login").hidden) poll(); });
  window.addEventListener("hashchange", () => {
    const asked_for = new URLSearchParams(location.hash.slice(1));
    if (asked_for.has("token")) {
      token = asked_for.get("token");
      keep.set("ftopt-token", token);
    }
    choose(asked_for.get("job") ?? job);
  });
  poll();
})();
