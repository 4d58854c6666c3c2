// The page: streams an answer token by token, polls the cluster's status, draws both.
// Talks to /forerun/* only (see orchestrator/http_page.py). What comes from there is set as text,
// never as HTML. No library, nothing to build.

const POLL_MS = 1000;
const NUM_POINTS = 60;
const NUM_COLOURS = 6; // --pool-0 ... in page.css

const $ = (id) => document.getElementById(id);
const colours = new Map(); // pool -> its CSS colour
const history = new Map(); // pool -> accepted shares, one per poll, null where nothing was drafted
const totals = new Map(); // pool -> [drafted, accepted] at the last poll
const hits = []; // { pool, share } of the last answers
let running = null; // the AbortController of the answer under way
let login = null; // the question for a token, while it is asked

// ------------------------------------------------------------ the server

async function call(path, body, signal) {
  const token = sessionStorage.getItem("token");
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const method = body ? "POST" : "GET";
  const response = await fetch(path, { method, headers, body: JSON.stringify(body), signal });
  if (response.ok) return response;
  if (response.status === 401) {
    await (login ??= askForToken());
    return call(path, body, signal);
  }
  throw new Error((await response.json()).error.message);
}

function askForToken() {
  return new Promise((resolve) => {
    $("login").addEventListener("close", () => {
      sessionStorage.setItem("token", $("token").value.trim());
      login = null;
      resolve();
    }, { once: true });
    $("login").showModal();
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const message = JSON.parse(part.slice("data: ".length));
      if (message.error) throw new Error(message.error.message);
      yield message;
    }
  }
}

// ------------------------------------------------------------ small things

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function paint(node, pool) {
  node.style.setProperty("--pool", colours.get(pool) ?? "var(--faint)");
  return node;
}

const percent = (share) => `${Math.round(100 * share)} %`;

function key(pool, text) {
  return [paint(element("span", { className: "swatch" }), pool), text];
}

function complain(error) {
  $("problem").hidden = !error;
  $("problem").textContent = error ? error.message : "";
}

// ------------------------------------------------------------ asking

function request() {
  const prompt = $("prompt").value;
  const input = $("form").value === "chat"
    ? { chat: { messages: [{ role: "user", content: prompt }] } }
    : { prompt };
  return {
    ...input,
    sampling: { temperature: Number($("temperature").value) },
    stopping: { max_new_tokens: Number($("tokens").value) },
    speculation: { drafter: $("drafter").value },
    output: { return_token_ids: true },
  };
}

function show(message) {
  const answer = $("answer");
  const isAtEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 4;
  (message.token_texts ?? []).forEach((text, index) => {
    const token = element("span", { textContent: text });
    if (message.origins[index] === "TOKEN_ORIGIN_ACCEPTED_DRAFT") {
      token.className = "draft";
      token.title = `drafted by ${message.drafter}`;
      token.dataset.drafter = message.drafter;
      paint(token, message.drafter);
    }
    answer.append(token);
  });
  if (isAtEnd) answer.scrollTop = answer.scrollHeight;
}

function summarise({ usage, speculation: spec, total_ms, time_to_first_token_ms }) {
  const seconds = (total_ms - time_to_first_token_ms) / 1000;
  const rate = seconds > 0 ? ((usage.completion_tokens - 1) / seconds).toFixed(1) : "–";
  const accepted = spec.num_accepted_draft_tokens ?? 0;
  $("summary").textContent =
    `${usage.completion_tokens} tokens, ${rate} per second · ` +
    `${accepted} of ${spec.num_draft_tokens ?? 0} draft tokens accepted · ` +
    `${spec.mean_acceptance_length.toFixed(2)} tokens per step with a draft`;
  const numHits = spec.num_plan_hits ?? 0;
  const numMisses = Object.values(spec.plan_misses ?? {}).reduce((sum, count) => sum + count, 0);
  if (numHits + numMisses === 0) return;
  hits.push({ pool: spec.drafter, share: numHits / (numHits + numMisses) });
  if (hits.length > NUM_POINTS) hits.shift();
  drawHits();
}

async function ask(submitted) {
  submitted.preventDefault();
  running = new AbortController();
  $("answer").replaceChildren();
  $("summary").textContent = "";
  complain(null);
  $("send").hidden = true;
  $("stop").hidden = false;
  try {
    const response = await call("/forerun/generate", request(), running.signal);
    for await (const message of events(response)) {
      show(message);
      if (message.finished) summarise(message.finished);
    }
  } catch (error) {
    if (error.name !== "AbortError") complain(error);
  } finally {
    $("send").hidden = false;
    $("stop").hidden = true;
  }
}

// ------------------------------------------------------------ charts

function clear(chart) {
  const lines = [15, 45, 75].map((y) => svg("line", { class: "grid", x1: 0, x2: 300, y1: y, y2: y }));
  chart.replaceChildren(...lines);
}

const height = (share) => 90 - 90 * Math.min(1, share);
function drawAcceptance() {
  clear($("acceptance"));
  const keys = [];
  for (const [pool, shares] of history) {
    const points = shares
      .map((share, index) => [300 - (shares.length - 1 - index) * (300 / NUM_POINTS), share])
      .filter(([, share]) => share !== null);
    if (points.length === 0) continue;
    const drawn = points.length > 1 ? points : [[points[0][0] - 4, points[0][1]], points[0]];
    const text = drawn.map(([x, share]) => `${x.toFixed(1)},${height(share).toFixed(1)}`).join(" ");
    $("acceptance").append(paint(svg("polyline", { points: text }), pool));
    keys.push(...key(pool, `${pool} ${percent(points.at(-1)[1])}`));
  }
  $("acceptance-key").replaceChildren(...(keys.length ? keys : ["nothing was drafted yet"]));
}

function drawHits() {
  clear($("hits"));
  const width = 300 / NUM_POINTS;
  hits.forEach(({ pool, share }, index) => {
    const x = 300 - (hits.length - index) * width;
    const y = Math.min(88, height(share));
    const bar = svg("rect", { x: x + 0.5, y, width: width - 1, height: 90 - y });
    $("hits").append(paint(bar, pool));
  });
  const last = hits.at(-1);
  const keys = last ? key(last.pool, `${last.pool} ${percent(last.share)}`) : ["no answer yet"];
  $("hits-key").replaceChildren(...keys);
}

// ------------------------------------------------------------ the cluster

function takeTotals(pool) {
  const now = [Number(pool.num_draft_tokens), Number(pool.num_accepted_draft_tokens)];
  const before = totals.get(pool.pool) ?? now;
  const drafted = now[0] - before[0];
  totals.set(pool.pool, now);
  if (!history.has(pool.pool)) history.set(pool.pool, []);
  const shares = history.get(pool.pool);
  shares.push(drafted > 0 ? (now[1] - before[1]) / drafted : null);
  if (shares.length > NUM_POINTS) shares.shift();
}

function takePools(pools) {
  for (const { pool } of pools) {
    if (colours.has(pool)) continue;
    colours.set(pool, `var(--pool-${colours.size % NUM_COLOURS})`);
    $("drafter").append(element("option", { value: pool, textContent: pool }));
    $("legend").append(...key(pool, `drafted by ${pool}`));
  }
  pools.forEach(takeTotals);
}

function scaleForm(pool) {
  const { min_replicas: min, max_replicas: max, wanted_replicas: value } = pool.scale;
  const input = element("input", { type: "number", min, max, value, ariaLabel: "Replicas" });
  const form = element("form", {}, input, " ", element("button", { textContent: "Scale" }));
  form.dataset.pool = pool.pool;
  form.addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    complain(null);
    const wanted = { pool: pool.pool, replicas: Number(input.value) };
    await call("/forerun/scale", wanted).catch(complain);
  });
  return form;
}

function groupRow(id, pool) {
  const cell = element("td", { colSpan: 4 }, element("span", { className: "title" }));
  if (pool?.scale) cell.append(scaleForm(pool));
  return element("tr", { className: "group", id }, cell);
}

function replicaRow({ replica_id, address, health, message, num_sequences, max_sequences, num_losses }) {
  const name = health.replace("REPLICA_HEALTH_", "");
  const cells = [
    element("td", { textContent: `${replica_id} ${address}` }),
    element("td", { className: name, textContent: name.toLowerCase(), title: message }),
    element("td", { textContent: max_sequences ? `${num_sequences} / ${max_sequences}` : num_sequences }),
    element("td", { textContent: num_losses }),
  ];
  return element("tr", {}, ...cells);
}

const groups = new Map(); // id -> the row, kept over polls: somebody may be typing in it

function drawCluster(status) {
  const wanted = [["verifiers", "target", null, status.verifiers]];
  for (const pool of status.drafter_pools) {
    wanted.push([`pool-${pool.pool}`, `${pool.pool} (${pool.kind})`, pool, pool.replicas]);
  }
  const body = $("replicas");
  for (const row of body.querySelectorAll("tr:not(.group)")) row.remove();
  for (const [id, title, pool, replicas] of wanted) {
    if (!groups.has(id)) {
      groups.set(id, groupRow(id, pool));
      body.append(groups.get(id));
    }
    const label = groups.get(id).querySelector(".title");
    const scale = pool?.scale;
    label.textContent = title + (scale ? ` · ${scale.wanted_replicas} wanted` : "");
    if (scale?.is_autoscaled) label.textContent += ", by demand";
    groups.get(id).after(...replicas.map(replicaRow));
  }
}

async function poll() {
  try {
    const status = await (await call("/forerun/status")).json();
    const model = status.model.split("/").pop(); // may be a path
    $("model").textContent = `${model} · ${status.version}`;
    $("totals").textContent =
      `${status.num_running} running, ${status.num_waiting} waiting · ` +
      `${Number(status.num_completion_tokens)} tokens in ${status.num_finished} requests`;
    takePools(status.drafter_pools);
    drawAcceptance();
    drawCluster(status);
  } catch (error) {
    $("totals").textContent = `not reachable: ${error.message}`;
  }
  setTimeout(poll, POLL_MS);
}

$("prompt-form").addEventListener("submit", ask);
$("stop").addEventListener("click", () => running.abort());
$("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && (pressed.ctrlKey || pressed.metaKey)) {
    pressed.preventDefault();
    $("prompt-form").requestSubmit();
  }
});
drawHits();
poll();
