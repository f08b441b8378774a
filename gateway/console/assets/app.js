// The console of a Weir node: it shows the events of /console/events, and asks the node's own API. All that comes from callers, keys
// above all, is put into the page as text.
"use strict";

const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** element makes an element; attributes whose value is null are left out, children are elements or text. */
function element(name, attributes, ...children) {
  const svg = ["svg", "g", "rect", "circle", "line", "text", "title"].includes(name);
  const e = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.filter(c => c !== null && c !== undefined));
  return e;
}

/** text sets an element's text, unless it has it already: so that nothing is read out twice. */
function text(e, value) {
  if (e.textContent !== value) e.textContent = value;
}

/**
 * list keeps a parent's children in step with items: each has the child that make returned for its key, brought up to date by update.
 * As long as one of them has the focus, the order stays as it is.
 */
function list(parent, items, keyOf, make, update) {
  const known = parent.children_ || (parent.children_ = new Map());
  const held = parent.contains(document.activeElement);
  const present = new Set();
  let at = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    present.add(key);
    let child = known.get(key);
    if (!child) {
      child = make(item);
      known.set(key, child);
      parent.insertBefore(child, held ? null : at);
    } else if (child !== at && !held) {
      parent.insertBefore(child, at);
    }
    if (child === at) at = at.nextSibling;
    update(child, item);
  }
  for (const [key, child] of known) {
    if (present.has(key) || child.contains(document.activeElement)) continue;
    child.remove();
    known.delete(key);
  }
}

// Numbers and times, for people.

const whole = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1});

const count = n => n < 100000 ? whole.format(n) : compact.format(n);
const perSecond = n => n === 0 ? "0" : n < 9.95 ? n.toFixed(2) : n < 100 ? n.toFixed(1) : count(Math.round(n));
const percent = x => (x > 0 && x < .01 ? "<1" : x < 1 && x > .99 ? ">99" : Math.round(x * 100)) + " %";

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  for (; n >= 1024 && i < units.length - 1; i++) n /= 1024;
  return (i === 0 ? n : n.toFixed(n < 10 ? 1 : 0)) + " " + units[i];
}

function duration(ms) {
  if (ms < 1000) return Math.ceil(ms) + " ms";
  const s = ms / 1000;
  if (s < 10) return s.toFixed(1) + " s";
  if (s < 60) return Math.ceil(s) + " s";
  const parts = (n, unit, rest, small) => Math.floor(n) + " " + unit + (Math.floor(rest) ? " " + Math.floor(rest) + " " + small : "");
  if (s < 3600) return parts(s / 60, "min", s % 60, "s");
  if (s < 86400) return parts(s / 3600, "h", s % 3600 / 60, "min");
  return parts(s / 86400, "d", s % 86400 / 3600, "h");
}

const plural = (n, one, many) => count(n) + " " + (n === 1 ? one : many);

// The token lives as long as the tab.

let token = sessionStorage.getItem("weir-token") || "";

function setToken(value) {
  token = value;
  if (value) sessionStorage.setItem("weir-token", value);
  else sessionStorage.removeItem("weir-token");
  $("token-button").hidden = !value;
  $("token-forget").hidden = !value;
}

const withToken = headers => token ? {...headers, Authorization: "Bearer " + token} : headers;

function askForToken(why) {
  if (why) text($("token-why"), why);
  if (!$("token-dialog").open) $("token-dialog").showModal();
  $("token").focus();
}

$("token-button").addEventListener("click", () => askForToken());
$("token-form").addEventListener("submit", () => {
  setToken($("token").value.trim());
  $("token").value = "";
  stream.restart();
});
$("token-forget").addEventListener("click", () => {
  setToken("");
  $("token-dialog").close();
  location.reload();
});

// The stream of events. EventSource cannot send a token, so it is read with fetch.

const stream = {
  control: null,
  wait: 0,

  state(name, words) {
    $("link").dataset.state = name;
    text($("link"), words);
  },

  restart() {
    if (this.control) this.control.abort();
    this.wait = 0;
    this.run();
  },

  stop() {
    if (this.control) this.control.abort();
    this.control = null;
    this.state("paused", "Paused");
  },

  async run() {
    const control = this.control = new AbortController();
    this.state("connecting", "Connecting");
    let words = "Disconnected";
    try {
      const answer = await fetch("/console/events", {headers: withToken({"Weir-Console": "page"}), signal: control.signal, cache: "no-store"});
      if (answer.status === 401 || answer.status === 403) {
        const problem = await answer.json();
        this.state("lost", "No access");
        askForToken(token ? problem.detail : undefined);
        return;
      }
      if (!answer.ok) {
        words = (await answer.text()).trim();
        throw new Error(words);
      }
      await this.read(answer.body.getReader());
    } catch (e) {
      if (control.signal.aborted) return;
    }
    this.state("lost", words);
    this.wait = Math.min(this.wait * 2 || 1000, 10000);
    setTimeout(() => { if (this.control === control) this.run(); }, this.wait);
  },

  async read(reader) {
    const decoder = new TextDecoder();
    for (let rest = "";;) {
      const {done, value} = await reader.read();
      if (done) return;
      rest += decoder.decode(value, {stream: true});
      for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
        const data = rest.slice(0, end).split("\n").filter(l => l.startsWith("data: ")).map(l => l.slice(6)).join("\n");
        if (data) show(JSON.parse(data));
      }
      this.state("live", "Live");
      this.wait = 0;
    }
  },
};

document.addEventListener("visibilitychange", () => document.hidden ? stream.stop() : stream.restart());

// What is shown.

let seen = null; // the newest snapshot

function show(snapshot) {
  seen = snapshot;
  showHeader();
  showMembers();
  showActivity();
  showPolicies();
  showKeys();
  showForm();
}

function showHeader() {
  const {status} = seen;
  text($("version"), status.node + " · " + status.version);
  const troubles = [];
  if (status.ready_detail) troubles.push(status.ready_detail);
  if (seen.policies.reload_error) troubles.push("The policy file was not taken: " + seen.policies.reload_error);
  text($("banner"), troubles.join("; "));
  $("banner").hidden = troubles.length === 0;
}

const colours = new Map();

/** colour is a member's, for as long as the page is open. */
function colour(name) {
  if (!colours.has(name)) colours.set(name, "m" + colours.size % 8);
  return colours.get(name);
}

function showMembers() {
  const {members, partitions} = seen.status;
  const held = m => m.ownership ? m.ownership.held : 0;
  const lost = members.filter(m => !m.reachable).length;
  const moving = members.reduce((n, m) => n + (m.ownership ? m.ownership.moving : 0), 0);
  const degraded = members.reduce((n, m) => n + (m.ownership ? m.ownership.degraded : 0), 0);
  text($("cluster-summary"), plural(members.length, "member", "members") + (lost ? ", " + count(lost) + " unreachable" : "") +
    (moving ? ", partitions are moving" : "") + (degraded && members.length > 1 ? ", some without a copy" : ""));
  list($("members"), members, m => m.name + " " + m.boot, makeMember, (e, m) => {
    const o = m.ownership;
    const share = m.partitions / partitions;
    text(e.querySelector(".share"), (share * 100).toFixed(1) + " %");
    e.querySelector(".bar > span").style.width = 100 * held(m) / partitions + "%";
    text(e.querySelector(".facts"), !m.reachable ? "does not answer" :
      "holds " + count(o ? o.held : 0) + " of " + count(m.partitions) + " partitions · " + plural(m.keys - m.keys_copied, "key", "keys") + ", " + count(m.keys_copied) +
      " copied · " + bytes(m.state_bytes) + (o && o.disk ? " · " + bytes(o.disk.bytes) + " on disk, synced " + duration(o.disk.synced_ms) + " ago" : "") + (m.borrowers ? " · lends to " + plural(m.borrowers, "borrower", "borrowers") : "") + " · up " + duration(m.uptime_ms));
    const tags = [];
    if (m.name === seen.status.node) tags.push(["", "this node"]);
    if (m.state !== "active") tags.push(["warn", m.state]);
    if (!m.reachable) tags.push(["bad", "unreachable"]);
    if (o && o.moving) tags.push(["warn", count(o.moving) + " moving away"]);
    if (o && o.awaited) tags.push(["warn", count(o.awaited) + " awaited"]);
    if (o && o.degraded && members.length > 1) tags.push(["warn", count(o.degraded) + " without a copy"]);
    if (o && o.disk && o.disk.error) tags.push(["bad", "counters not saved: " + o.disk.error]);
    list(e.querySelector(".tags"), tags, t => t.join(" "), t => element("span", {class: "tag " + t[0]}, t[1]), () => {});
  });
  showRing(members, partitions, held);
}

function makeMember(m) {
  const c = colour(m.name);
  return element("li", {},
    element("div", {class: "name"}, element("span", {class: "dot " + c}), element("b", {}, m.name), element("span", {class: "tags"}), element("span", {class: "share"})),
    element("div", {class: "bar " + c}, element("span")),
    element("div", {class: "facts"}));
}

/** showRing draws who holds how much: an arc for each member, and a gap for what nobody holds at the moment. */
function showRing(members, partitions, held) {
  const box = $("ring");
  if (!box.firstChild) {
    box.append(element("svg", {viewBox: "0 0 120 120", role: "img"},
      element("circle", {class: "free", cx: 60, cy: 60, r: 50}),
      element("g", {transform: "rotate(-90 60 60)"}),
      element("text", {class: "big", x: 60, y: 63}),
      element("text", {class: "soft", x: 60, y: 75})));
  }
  const around = 2 * Math.PI * 50;
  let from = 0;
  const arcs = members.map(m => {
    const length = around * held(m) / partitions;
    const arc = {key: m.name + " " + m.boot, member: m, from, length};
    from += length;
    return arc;
  });
  list(box.querySelector("g"), arcs, a => a.key, a => element("circle", {class: colour(a.member.name), cx: 60, cy: 60, r: 50}), (e, a) => {
    const gap = members.length > 1 ? Math.min(1.2, a.length) : 0;
    e.setAttribute("stroke-dasharray", (a.length - gap) + " " + (around - a.length + gap));
    e.setAttribute("stroke-dashoffset", -a.from);
  });
  const whole = members.reduce((n, m) => n + held(m), 0);
  text(box.querySelector("text.big"), percent(whole / partitions));
  text(box.querySelector("text.soft"), "of partitions held");
  box.firstChild.setAttribute("aria-label", "Partitions: " + members.map(m => m.name + " holds " + percent(held(m) / partitions)).join(", "));
}

// Steps are [allowed, refused, shadowed, failed open, failed closed, errors], the present one first.

const steps = 60;

/** columns are the complete steps of a policy, the oldest first, as allowed, refused and failed. */
function columns(history) {
  return Array.from({length: steps}, (_, i) => {
    const s = history[steps - i] || [0, 0, 0, 0, 0, 0];
    return [s[0] + s[2], s[1], s[3] + s[4]];
  });
}

/** lately adds up the last three complete steps and the present one, a second. */
function lately(history) {
  const n = Math.min(history.length, 4);
  const seconds = (seen.history.age_ms + (n - 1) * seen.history.step_ms) / 1000;
  const sum = [0, 0, 0];
  for (const s of history.slice(0, n)) {
    sum[0] += s[0] + s[2];
    sum[1] += s[1];
    sum[2] += s[3] + s[4];
  }
  return sum.map(x => seconds > 0 ? x / seconds : 0);
}

/** bars draws columns in an svg that is made once. */
function bars(svg, rows, top) {
  const height = 100;
  const wanted = [];
  rows.forEach((row, i) => {
    let y = height;
    row.forEach((n, k) => {
      if (!n) return;
      const h = Math.max(height * n / top, 1);
      y -= h;
      wanted.push({key: i + " " + k, i, y, h, name: ["allowed", "refused", "failed"][k]});
    });
  });
  list(svg.querySelector("g"), wanted, w => w.key, w => element("rect", {class: w.name, x: w.i * 10 + 1, width: 8}), (e, w) => {
    e.setAttribute("y", w.y);
    e.setAttribute("height", w.h);
  });
}

const makeBars = name => element("svg", {class: name, viewBox: "0 0 600 100", preserveAspectRatio: "none", role: "img"}, element("g"));

function nice(n) {
  const unit = 10 ** Math.floor(Math.log10(n));
  return [1, 2, 5, 10].map(f => f * unit).find(x => x >= n);
}

function showActivity() {
  const all = Object.values(seen.history.policies);
  const rows = Array.from({length: steps}, () => [0, 0, 0]);
  const rates = [0, 0, 0];
  for (const history of all) {
    columns(history).forEach((c, i) => c.forEach((n, k) => { rows[i][k] += n; }));
    lately(history).forEach((n, k) => { rates[k] += n; });
  }
  const sum = rates[0] + rates[1] + rates[2];
  const part = n => n ? percent(n / sum) : "";
  text($("rate-all"), perSecond(sum));
  text($("rate-allowed"), perSecond(rates[0]));
  text($("rate-refused"), perSecond(rates[1]));
  text($("part-refused"), part(rates[1]));
  text($("rate-failed"), perSecond(rates[2]));
  text($("part-failed"), part(rates[2]));
  const box = $("chart");
  if (!box.firstChild) {
    const svg = makeBars("");
    for (const y of [0, 50, 100]) svg.insertBefore(element("line", {class: "grid", x1: 0, x2: 600, y1: y, y2: y}), svg.firstChild);
    box.append(element("div", {class: "axis"}, element("span", {class: "top"}), element("span")), svg,
      element("div", {class: "axis"}, element("span", {}, "5 min ago"), element("span", {}, "now")));
  }
  const top = nice(Math.max(...rows.map(r => r[0] + r[1] + r[2]), 5));
  text(box.querySelector(".top"), perSecond(top * 1000 / seen.history.step_ms) + " a second");
  const svg = box.querySelector("svg");
  bars(svg, rows, top);
  svg.setAttribute("aria-label", "At present " + perSecond(rates[0]) + " checks a second are allowed, " + perSecond(rates[1]) + " refused");
}

const algorithmNames = {fixed_window: "fixed window", sliding_window: "sliding window", sliding_counter: "sliding counter", sliding_log: "sliding log",
  token_bucket: "token bucket", leaky_bucket: "leaky bucket", concurrency: "concurrency"};

const limitText = l => l.algorithm === "concurrency" ? l.limit + " at once" :
  count(l.limit) + " / " + l.window + (l.capacity && l.capacity !== l.limit ? ", up to " + count(l.capacity) : "");

function policyText(p) {
  if (p.limits.length === 0) return "unlimited";
  return algorithmNames[p.limits[0].algorithm] + ", " + p.limits.map(limitText).join(" and ");
}

function showPolicies() {
  const listed = new Map(seen.policies.policies.map(p => [p.name, p]));
  const history = seen.history.policies;
  const names = [...listed.keys(), ...Object.keys(history).filter(n => !listed.has(n))];
  text($("policies-summary"), plural(listed.size, "policy", "policies") + (seen.history.left ? "; the busiest " + Object.keys(history).length + " have charts" : ""));
  const fullest = new Map();
  for (const k of seen.top ? seen.top.fullest.keys : []) {
    const name = k.policy || "(inline)";
    if (k.utilization !== undefined && !fullest.has(name)) fullest.set(name, k);
  }
  list($("policies").tBodies[0], names, n => n, makePolicy, (row, name) => {
    const p = listed.get(name);
    const cells = row.children;
    const mine = history[name] || [];
    text(row.querySelector("th small"), p ? policyText(p) + (p.overrides ? ", " + plural(p.overrides, "override", "overrides") : "") :
      name === "(inline)" ? "limits sent along with requests" : name === "(unknown)" ? "policies that do not exist" : "no longer in force");
    list(row.querySelector(".tags"), p && p.shadow ? ["shadow"] : [], t => t, t => element("span", {class: "tag warn"}, t), () => {});
    const rates = lately(mine);
    const sum = rates[0] + rates[1] + rates[2];
    const rows = columns(mine);
    const svg = cells[1].firstChild;
    bars(svg, rows, Math.max(...rows.map(r => r[0] + r[1] + r[2]), 1));
    svg.setAttribute("aria-label", name + ": " + perSecond(rates[0]) + " allowed and " + perSecond(rates[1]) + " refused a second");
    text(cells[2], perSecond(sum));
    text(cells[3], sum ? percent(rates[1] / sum) : "–");
    showUsed(cells[4], fullest.get(name));
  });
}

function makePolicy(name) {
  return element("tr", {role: "row"},
    element("th", {scope: "row", role: "rowheader"}, name + " ", element("span", {class: "tags"}), element("small")),
    element("td", {role: "cell", class: "full-row"}, makeBars("spark")),
    element("td", {role: "cell", class: "n", "data-label": "checks/s"}),
    element("td", {role: "cell", class: "n", "data-label": "refused"}),
    element("td", {role: "cell", class: "used-cell full-row"}, ...makeUsed()));
}

const makeUsed = () => [element("div", {class: "bar used"}, element("span")), element("small")];

function showUsed(cell, k) {
  const bar = cell.firstChild;
  bar.hidden = !k || k.utilization === undefined;
  if (bar.hidden) {
    text(cell.lastChild, "–");
    return;
  }
  bar.firstChild.style.width = Math.min(100 * k.utilization, 100) + "%";
  bar.className = "bar " + (k.utilization >= 1 ? "full" : k.utilization > .9 ? "high" : "used");
  text(cell.lastChild, count(k.used) + " of " + count(k.limit));
}

const order = () => document.querySelector("input[name=order]:checked").value;
$("orders").addEventListener("change", () => { if (seen) showKeys(); });

function showKeys() {
  const none = $("keys-none");
  if (!seen.top) {
    text(none, "To see keys, which are callers' data, takes a token with the role keys.");
    none.hidden = false;
    $("keys").hidden = $("orders").hidden = true;
    text($("keys-summary"), "");
    return;
  }
  $("keys").hidden = $("orders").hidden = false;
  const top = seen.top[order()];
  const rows = top.keys.filter(k => order() === "busiest" ? k.decisions > 0 : order() === "refused" ? k.refused > 0 : k.utilization > 0);
  const seconds = top.counted_ms / 1000;
  text($("keys-summary"), "of the last " + (seconds < 50 ? Math.ceil(seconds) + " seconds" : "minute") + (top.unreachable.length ? "; missing: " + top.unreachable.join(", ") : ""));
  const rate = n => seconds > 0 ? perSecond(n / seconds) : "–";
  list($("keys").tBodies[0], rows, k => [k.policy, k.namespace, k.key].join("\u0000"), makeKey, (row, k) => {
    const cells = row.children;
    text(cells[2], rate(k.decisions));
    text(cells[3], rate(k.refused));
    showUsed(cells[4], k);
  });
  text(none, "No key was " + (order() === "refused" ? "refused." : "decided on."));
  none.hidden = rows.length > 0;
  $("keys").hidden = rows.length === 0;
}

function makeKey(k) {
  const name = element("button", {type: "button", class: "plain key", title: "Try a check of this key"}, k.key);
  name.addEventListener("click", () => {
    if (k.policy) $("try-policy").value = k.policy;
    $("try-key").value = k.key;
    $("try-key").focus();
    look();
  });
  return element("tr", {role: "row"},
    element("th", {scope: "row", role: "rowheader"}, k.policy ? name : element("span", {class: "key"}, k.key)),
    element("td", {role: "cell", class: "policy-cell"}, k.policy || "inline, " + (k.namespace || "default")),
    element("td", {role: "cell", class: "n", "data-label": "checks/s"}),
    element("td", {role: "cell", class: "n", "data-label": "refused/s"}),
    element("td", {role: "cell", class: "used-cell"}, ...makeUsed()));
}

// The form.

const may = role => seen && seen.roles.includes(role);

function showForm() {
  const names = seen.policies.policies.filter(p => !p.limits.some(l => l.algorithm === "concurrency")).map(p => p.name);
  const select = $("try-policy");
  const chosen = select.value;
  list(select, names, n => n, n => element("option", {value: n}, n), () => {});
  if (!chosen && names.includes("login")) select.value = "login";
  $("try-check").disabled = !may("check") || names.length === 0;
  $("try-look").disabled = !may("keys") || names.length === 0;
  $("try-reset").hidden = !may("refund");
  $("try-reset").disabled = names.length === 0;
}

/** post asks the API, and returns the status and the answer. */
async function post(path, body) {
  const answer = await fetch(path, {method: "POST", headers: withToken({"Content-Type": "application/json"}), body: JSON.stringify(body)});
  return [answer.status, await answer.json()];
}

const target = () => ({policy: $("try-policy").value, key: $("try-key").value});

function verdict(kind, title, ...lines) {
  $("decision").replaceChildren(element("div", {class: "verdict " + kind}, element("strong", {}, title), ...lines.map(l => element("p", {}, l))));
}

function showDecision(status, d, of) {
  if (d.detail !== undefined || d.allowed === undefined) {
    verdict("", "No decision", d.detail || d.title || "status " + status);
    return;
  }
  const facts = [plural(d.remaining, "unit", "units") + " of " + count(d.limit) + " left for " + of.key];
  if (d.limit < 0) facts[0] = of.key + " has no limit";
  if (!d.allowed) facts.push(d.retry_after_ms === undefined ? "it can never pass" : "the same passes in " + duration(d.retry_after_ms));
  if (d.delay_ms) facts.push("it may go in " + duration(d.delay_ms));
  if (d.banned) facts.push("banned");
  if (d.reset_after_ms) facts.push("as new in " + duration(d.reset_after_ms));
  if (d.degraded) facts.push("no other node has a copy of this yet");
  const title = d.failed_open ? "Admitted without counting: the owner could not be asked" : d.failed_closed ? "Refused without counting: the owner could not be asked" :
    d.shadow ? "Admitted by shadow mode only" : d.allowed ? "Allowed" : "Refused";
  verdict(d.failed_open || d.failed_closed || d.shadow ? "failed" : d.allowed ? "ok" : "no", title, facts.join(" · "));
}

let shown = null; // the state that is counting down

async function look() {
  if (!may("keys")) return;
  const of = target();
  try {
    const [status, answer] = await post("/v1/keys/describe", of);
    shown = status === 200 ? {of, answer, at: performance.now()} : null;
    if (!shown) verdict("", "No state", answer.detail || "status " + status);
  } catch (e) {
    shown = null;
  }
  showState();
}

function showState() {
  const box = $("state");
  if (!shown) {
    box.replaceChildren();
    return;
  }
  const passed = performance.now() - shown.at;
  const {limits, node} = shown.answer;
  if (limits.length === 0) {
    box.replaceChildren(element("p", {class: "soft"}, node + " decides for this key, which needs no state."));
    return;
  }
  const ban = (shown.answer.banned_for_ms || 0) - passed;
  const banned = ban > 0 ? [element("p", {class: "banned"}, "Banned for " + duration(ban) + " more.")] : [];
  box.replaceChildren(...banned, ...limits.map((l, i) => {
    const left = l.returns.map(r => ({units: r.units, after: r.after_ms - passed})).filter(r => r.after > 0);
    const back = l.returns.reduce((n, r) => n + (r.after_ms <= passed ? r.units : 0), 0);
    const used = Math.max(l.limit - l.remaining - back, 0);
    const e = element("div", {class: "limit-state"},
      element("p", {}, "As " + node + " has it: ", element("b", {}, count(used) + " of " + count(l.limit)), " in use, " + algorithmNames[l.algorithm] + (shown.answer.on_loan ? ", " + count(shown.answer.on_loan) + " of them on loan" : "")),
      element("div", {class: "bar " + (used >= l.limit ? "full" : "used")}, element("span")));
    e.querySelector(".bar > span").style.width = Math.min(100 * used / l.limit, 100) + "%";
    if (left.length) e.append(timeline(l, left), returns(l, left));
    return e;
  }));
}

/** timeline draws when units come back, from now to the end of the window. */
function timeline(l, left) {
  const end = Math.max(l.window_ms || 0, left[left.length - 1].after);
  const svg = element("svg", {viewBox: "0 0 600 46", preserveAspectRatio: "none", "aria-hidden": "true"}, element("line", {x1: 0, x2: 600, y1: 30, y2: 30}));
  const box = element("div", {class: "timeline"}, svg, element("div", {class: "axis"}, element("span", {}, "now"), element("span", {}, "in " + duration(end))));
  for (const r of left) {
    const x = 600 * r.after / end;
    const h = Math.min(8 + 4 * Math.log2(r.units), 28);
    svg.append(element("rect", {class: "allowed", x: Math.min(Math.max(x - 2, 0), 596), y: 30 - h, width: 4, height: h}));
  }
  return box;
}

function returns(l, left) {
  const most = 12;
  const items = left.slice(0, most).map(r => element("li", {}, plural(r.units, "unit", "units") + " in " + duration(r.after)));
  if (left.length > most || l.returns.length === 64) items.push(element("li", {class: "soft"}, "and more later"));
  return element("ul", {class: "returns", "aria-label": l.algorithm === "sliding_log" ? "When each admission leaves the window" : "When units can be used again"}, ...items);
}

setInterval(() => { if (shown && !document.hidden) showState(); }, 1000);

$("try").addEventListener("submit", async event => {
  event.preventDefault();
  const of = target();
  try {
    const [status, answer] = await post("/v1/check", {...of, cost: Number($("try-cost").value)});
    showDecision(status, answer, of);
  } catch (e) {
    verdict("", "No answer", "The node cannot be reached.");
    return;
  }
  await look();
});

$("try-look").addEventListener("click", () => {
  if (!$("try").reportValidity()) return;
  $("decision").replaceChildren();
  look();
});

$("try-reset").addEventListener("click", () => {
  if (!$("try").reportValidity()) return;
  const of = target();
  text($("reset-key"), of.key);
  text($("reset-policy"), of.policy);
  $("reset-dialog").returnValue = "";
  $("reset-dialog").showModal();
});

$("reset-dialog").addEventListener("close", async () => {
  if ($("reset-dialog").returnValue !== "reset") return;
  const of = target();
  try {
    const [status, answer] = await post("/v1/reset", of);
    if (status === 200) verdict("ok", "Reset", of.key + " is as new under " + of.policy);
    else verdict("", "Not reset", answer.detail || "status " + status);
  } catch (e) {
    verdict("", "No answer", "The node cannot be reached.");
    return;
  }
  await look();
});

setToken(token);
stream.run();
