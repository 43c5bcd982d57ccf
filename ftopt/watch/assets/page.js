// The live page: asks /live every two seconds and shows the answer. Data from replicas are shown as text only.
if (report === null) (() => {
  const POLL_MS = 2000, GIVE_UP_MS = 8000;
  const CHARTS = [
    ["training", "training", "level"], ["waiting", "waiting", "level"], ["other", "in other states", "level"],
    ["stalled", "stalled", "level", "trouble"], ["away", "away", "level", "trouble"],
    ["not_finite", "loss NaN or inf", "level", "trouble"],
    ["steps_per_s", "inner steps/s", "level", "group"], ["outer_steps", "outer steps", "count"],
    ["aborts", "failed attempts", "count", "trouble"],
    ["stalls", "stalls", "count", "trouble group"], ["lost", "connections lost", "count", "trouble"],
    ["deaths", "given up", "count", "trouble"], ["joins", "joined", "count"],
  ];
  const UNUSUAL = ["not_finite"];  // shown only when there is something to show
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
  let job = given.get("job"), range = 0, history = "", count = 0, told = -1, known = [], hues = new Map();
  let answeredAt = null, timer = 0, asked = 0;

  if (given.has("token")) {  // removed from the address bar and the browser's history
    keep.set("ftopt-token", token);
    remember();
  }
  $("where").textContent = location.host;

  function remember() {
    const hash = job === null ? "" : `#${new URLSearchParams({ job })}`;
    window.history.replaceState(null, "", location.pathname + hash);
  }

  // ------------------------------------------------------------ elements

  function setText(node, text) {
    if (node.textContent !== String(text)) node.textContent = text;
  }

  function element(name, className = "", text = "") {
    const node = document.createElement(name);
    node.className = className;
    node.textContent = text;
    return node;
  }

  function svg(name, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
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
    const first = element("th", head);
    first.scope = "row";
    row.append(first, ...classes.map((name) => element("td", name)));
    return row;
  }

  function put(row, ...texts) {
    texts.forEach((text, index) => setText(row.children[index], text));
  }

  function note(id, text) {
    $(id).hidden = text === "";
    setText($(id), text);
  }

  // ------------------------------------------------------------ words

  const two = (number) => String(number).padStart(2, "0");

  function clock(ms) {
    const at = new Date(ms), now = new Date();
    const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
    const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
    return at.toDateString() === now.toDateString() ? time : `${day} ${time}`;
  }

  function duration(s) {
    if (s < 120) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
    if (s < 7200) return `${Math.round(s / 60)} min`;
    return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
  }

  function few(number, digits = 3) {
    if (number === 0) return "0";
    if (number >= 100) return Math.round(number).toLocaleString("en");
    return String(Number(number.toPrecision(digits)));
  }

  function figure(loss) {  // a loss: a number, a word, or null
    if (typeof loss !== "number") return loss === null ? "-" : loss.replace("nan", "NaN");
    return loss && (Math.abs(loss) < 1e-4 || Math.abs(loss) >= 1e4) ? loss.toExponential(2) : loss.toPrecision(4);
  }

  const whole = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
  const plural = (number, one, many) => `${number} ${number === 1 ? one : many}`;

  // ------------------------------------------------------------ what is shown

  function showJobs(jobs, current) {
    $("jobs").hidden = jobs.length < 2;
    $("none").hidden = jobs.length > 0;
    $("data").hidden = jobs.length === 0;
    fill($("jobs"), jobs, (x) => x.job, (x) => {
      const button = element("button");
      button.type = "button";
      button.append(element("span"), element("small"));
      button.addEventListener("click", () => choose(x.job));
      return button;
    }, (button, x) => {
      put(button, x.job, connected(x) || x.phase.split(":")[0]);
      button.setAttribute("aria-current", x.job === current ? "true" : "false");
    });
  }

  /** How many are connected; "" if the job does not run: its phase says what it waits for, or that it has ended. */
  function connected(x) {
    return x.phase !== "running" ? "" : `${x.connected} of ${plural(x.replicas, "replica", "replicas")} connected`
      + `${x.stalled ? `, ${x.stalled} stalled` : ""}`;
  }

  function showJob(x) {
    const step = x.inner_step === null ? "" : `, inner step ${whole(x.inner_step)}`;
    setText($("job"), `${x.job}: ${x.phase}${step}`);
    setText($("summary"), `${connected(x) ? `${connected(x)}; ` : ""}observed since ${clock(x.began_s * 1000)}`);
    document.title = `${x.job}${step || `: ${x.phase.slice(0, 40)}`} - ftopt`;
    showRounds(x);
    showMembers(x);
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

  function showMembers(x) {
    const members = [...x.members].sort((a, b) => byName.compare(a.replica, b.replica));
    const speed = (m) => (m.step_s > 0 && m.level !== "away" ? 1 / m.step_s : 0);
    const fastest = Math.max(...members.map(speed), 1e-9);
    $("members").className = members.every((m) => m.loss === null) ? "no-losses" : "";
    fill($("members").tBodies[0], members, (m) => m.replica,
      () => cells("name", "state", "number", "number meter", "number loss", "number", "number"),
      (row, m) => {
        row.className = `${m.level} ${m.round}`;
        const [low, high] = m.versions;
        const state = m.factor ? `${m.state}, ${few(m.factor, 2)} times` : m.state;
        put(row, m.replica, m.round ? `${state}, ${m.round}` : state, m.inner_step === null ? "-" : whole(m.inner_step), speed(m) ? few(speed(m)) : "-",
          m.level === "away" ? "-" : figure(m.loss), low === undefined ? "-" : low === high ? whole(low) : `${whole(low)} to ${whole(high)}`, m.incarnation || "-");
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
      const item = element("li"), at = element("time", "", clock(e.at_s * 1000));
      at.dateTime = new Date(e.at_s * 1000).toISOString();
      item.append(at, element("span", "", e.times > 1 ? `${e.text} (${e.times} times in a row)` : e.text));
      return item;
    }));
    $("no-events").hidden = events.length > 0;
  }

  // ------------------------------------------------------------ charts

  function spans(answer) {  // seconds of a row, and rows of a whole chart
    return [[answer.sample_s, 300], [answer.sample_s * 30, 360], [answer.sample_s * 450, 384]][range];
  }

  function showCharts(answer) {
    const x = answer.job, [rowS, keepRows] = spans(answer);
    const rows = [...known, x.recent];  // rows come with a delay
    const nowS = rows.length ? rows[rows.length - 1][0] : 0;
    const wholeS = Math.min(rowS * keepRows, Math.max(nowS, rowS * 30));  // the first minutes of a job fill the chart
    const young = wholeS < rowS * keepRows;
    setText($("range-name"), young ? duration(wholeS) : answer.ranges[range]);
    setText($("from"), `${duration(wholeS)} ago`);
    setText($("to"), "now");
    fill($("ranges"), answer.ranges.map((text, index) => ({ text, index })), (r) => r.index, (r) => {
      const button = element("button");
      button.type = "button";
      button.addEventListener("click", () => { range = r.index; forget(); poll(); });
      return button;
    }, (button, r) => {
      setText(button, r.text);
      button.setAttribute("aria-pressed", r.index === range ? "true" : "false");
    });
    showLosses(answer, rows, nowS, wholeS, rowS);
    fill($("numbers"), CHARTS, ([name]) => name, ([, , , className]) => {
      const row = cells("", "picture", "number", "number");
      row.className = className ?? "";
      const picture = svg("svg", { viewBox: "0 0 1000 26", preserveAspectRatio: "none", role: "img" });
      picture.append(svg("line", { x1: 0, x2: 1000, y1: 25.5, y2: 25.5 }), svg("path", { d: "" }));
      row.children[1].append(picture);
      return row;
    }, (row, [name, label, kind]) => {
      const column = answer.columns.indexOf(name), values = rows.map((r) => r[column]);
      const top = Math.max(...values, kind === "level" && name !== "steps_per_s" ? x.replicas : 0, 1e-9);
      const last = values.length ? values[values.length - 1] : 0, most = Math.max(...values, 0);
      const sum = values.reduce((a, b) => a + b, 0);
      row.hidden = UNUSUAL.includes(name) && most === 0;
      setText(row.children[0], label);
      setText(row.children[2], kind === "count" ? `${few(sum)} in all` : few(last));
      setText(row.children[3], kind === "count" ? "" : few(most));
      const picture = row.children[1].firstChild;
      picture.setAttribute("aria-label", kind === "count" ? `${label}: ${few(sum)} in the time shown`
        : `${label}: now ${few(last)}, at most ${few(most)} in the time shown`);
      picture.lastChild.setAttribute("d", most ? path(rows, values, top, kind, nowS, wholeS, rowS) : "");
    });
  }

  function showLosses(answer, rows, nowS, wholeS, rowS) {
    const drawn = lossLines(rows, answer.columns, { nowS, wholeS, rowS }, byName.compare);
    hues = new Map(drawn.apart ? drawn.names.map((name, index) => [name, index % HUES]) : []);
    $("losses").hidden = !drawn.some;
    note("about-losses", !drawn.some ? "No loss in the time shown. A replica tells it with optimizer.count(loss=loss) before "
      + `step(); the page takes it every ${answer.sample_s} s.`
      : drawn.apart && !answer.job.members.length ? "Loss: a line per replica; point at one for its name."
      : drawn.apart ? "Loss: a line per replica, in the colour beside its name; now: their mean."
      : "Loss: the line is the replicas' mean; the band goes from the least to the most.");
    if (!drawn.some) return;
    fill($("loss-lines"), drawn.paths, (x) => x.key, () => {
      const path = svg("path", {});
      path.append(svg("title", {}));
      return path;
    }, (path, x) => {
      path.setAttribute("class", x.index === undefined ? x.key : `of l${x.index % HUES}`);
      path.setAttribute("d", x.d);
      setText(path.firstChild, x.title);
    });
    const [now, low, high] = [drawn.now, drawn.low, drawn.high].map(figure);
    setText($("loss-now"), now);
    for (const id of ["loss-top", "loss-most"]) setText($(id), high);
    setText($("loss-least"), low);
    $("loss-lines").setAttribute("aria-label", `loss: now ${now}, from ${low} to ${high} in the time shown`);
  }

  function path(shown, values, top, kind, nowS, wholeS, rowS) {
    const across = (t) => (1000 * (1 - (nowS - t) / wholeS)).toFixed(1);
    const up = (value) => (25 - (23 * value) / top).toFixed(1);
    if (kind === "count") {
      return shown.map((r, i) => (values[i] === 0 ? ""
        : `M${across(Math.max(r[0] - rowS, i ? shown[i - 1][0] : 0))} 25V${up(values[i])}H${across(r[0])}V25Z`)).join("");
    }
    let text = "", before = -Infinity, from = 0;
    shown.forEach((r, i) => {  // steps; gaps where no sample was taken, such as while the machine slept
      const begins = r[0] - before > 3 * rowS;
      if (begins && text) text += `V25Z`;
      from = begins ? r[0] - rowS : before;
      text += begins ? `M${across(from)} 25V${up(values[i])}H${across(r[0])}` : `V${up(values[i])}H${across(r[0])}`;
      before = r[0];
    });
    return text ? `${text}V25Z` : "";
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
    count = 0;
    told = -1;
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
    showCharts(answer);
    showJob(x);
    if (x.events !== null) showEvents(x.events);
    told = x.told;
  }

  function broken(why) {
    const since = answeredAt === null ? "no answer yet" : `no answer since ${clock(answeredAt)}`;
    $("connection").className = "broken";
    setText($("connection"), `${since} (${why}); trying again`);
    $("data").classList.add("stale");
    if (answeredAt !== null) document.title = `${since} - ftopt`;
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
    const query = new URLSearchParams({ range, history, after: count, told: Math.max(told, 0) });
    if (job !== null) query.set("job", job);
    let again = true;
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
      if (!answer.ok) throw new Error(`it answers ${answer.status}`);
      const data = await answer.json();
      if (mine !== asked) return;
      answeredAt = Date.now();
      $("login").hidden = true;
      $("data").classList.remove("stale");
      $("connection").className = "";
      setText($("connection"), `live, ${clock(answeredAt)}`);
      take(data);
    } catch (error) {
      if (mine !== asked) return;
      broken(error.name === "TimeoutError" ? "it takes too long" : error.name === "TypeError" ? "not reachable"
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
