// The page is a client like every other: /v1/models, /v1/images/generations as a stream, and /readyz.
const $ = (id) => document.getElementById(id);
const state = { models: [], running: null, shown: null };
const seconds = (value) => (value < 10 ? value.toFixed(2) : value.toFixed(1)) + " s";

function headers() {
  const key = $("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

function model() {
  return state.models.find((entry) => entry.id === $("model").value);
}

function options(select, values) {
  select.replaceChildren(...values.map(([value, text]) => new Option(text, value)));
}

async function loadModels() {
  const response = await fetch("v1/models", { headers: headers() });
  if (response.status === 401) {
    askForKey("This server needs an API key.");
    return;
  }
  if (!response.ok) return;
  state.models = (await response.json()).data.filter((entry) => entry.tritium.kinds.includes("image"));
  if (!state.models.length) return;
  options($("model"), state.models.map((entry) => [entry.id, entry.id]));
  $("model-field").hidden = state.models.length < 2;
  chooseModel();
}

function askForKey(why) {
  $("key-field").hidden = false;
  problem(why);
  $("key").focus();
}

function chooseModel() {
  const facts = model().tritium;
  options($("size"), facts.sizes.map((size) => [size, size.replace("x", " × ")]));
  $("steps").max = Math.min(facts.max_steps, Math.max(50, facts.steps));
  $("steps").value = facts.steps;
  showSteps();
  $("negative-field").hidden = !facts.takes.includes("negative_prompt");
  $("guidance-field").hidden = !facts.takes.includes("guidance");
  $("lora-field").hidden = !facts.loras.length;
  options($("lora"), [["", "none"], ...facts.loras.map((name) => [name, name])]);
  $("more").hidden = [...$("more").querySelectorAll("label")].every((label) => label.hidden);
}

function showSteps() {
  $("steps-value").value = $("steps").value;
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function request() {
  const chosen = { seed: $("seed").value.trim() === "" ? undefined : Number($("seed").value), steps: Number($("steps").value) };
  if (!$("negative-field").hidden && $("negative").value) chosen.negative_prompt = $("negative").value;
  if (!$("guidance-field").hidden && $("guidance").value) chosen.guidance_scale = Number($("guidance").value);
  if ($("lora").value) chosen.loras = [{ name: $("lora").value }];
  return {
    model: $("model").value, prompt: $("prompt").value, size: $("size").value, stream: true,
    tritium: { ...chosen, previews: Math.min(chosen.steps, 24), progress: true },
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function generate(event) {
  event.preventDefault();
  if (state.running || !$("form").reportValidity() || !model()) return;
  const sent = request();
  const running = { abort: new AbortController(), began: performance.now(), word: "Sent", sent };
  state.running = running;
  problem("");
  busy(true);
  const clock = setInterval(() => news(`${running.word} · ${seconds((performance.now() - running.began) / 1000)}`), 100);
  try {
    const response = await fetch("v1/images/generations", {
      method: "POST", signal: running.abort.signal, body: JSON.stringify(sent),
      headers: { "content-type": "application/json", ...headers() },
    });
    if (response.status === 401) askForKey("This API key is not accepted.");
    else if (!response.ok) problem((await response.json()).error.message);
    else for await (const part of events(response)) take(part, running);
  } catch (error) {
    problem(running.abort.signal.aborted ? "" : "The connection to the server was lost.");
  } finally {
    clearInterval(clock);
    state.running = null;
    busy(false);
    if (!running.done) { news(running.abort.signal.aborted ? "Stopped" : ""); restore(); }
    poll();
  }
}

function take(part, running) {
  if (part.type === "tritium.queued") running.word = part.ahead ? `Waiting behind ${part.ahead}, about ${seconds(part.wait)}` : "Starting";
  if (part.type === "tritium.started") running.word = "Starting";
  if (part.type === "tritium.step") {
    running.word = `Step ${part.index} of ${part.total}`;
    $("progress").value = part.index / part.total;
  }
  if (part.type.endsWith(".partial_image")) show(part, `preview · step ${part.tritium.step}`, true);
  if (part.type.endsWith(".completed")) finish(part, running);
  if (part.error) problem(part.error.message);
}

function source(part) {
  return `data:image/${part.output_format};base64,${part.b64_json}`;
}

function show(part, badge, preview) {
  $("image").src = source(part);
  $("image").hidden = false;
  $("image").alt = preview ? "Preview of the image" : $("prompt").value;
  $("hint").hidden = true;
  $("badge").textContent = badge;
  $("badge").hidden = !badge;
  $("stage").classList.toggle("preview", preview);
}

function finish(part, running) {
  running.done = true;
  const made = { part, sent: running.sent, promises: model().tritium, total: (performance.now() - running.began) / 1000 };
  const item = document.createElement("li");
  const button = document.createElement("button");
  const small = document.createElement("img");
  button.type = "button";
  button.setAttribute("aria-label", `Show image with seed ${part.tritium.seed}: ${made.sent.prompt}`);
  small.src = source(part);
  small.alt = "";
  button.append(small);
  button.addEventListener("click", () => { if (!state.running) open(made, button); });
  item.append(button);
  $("history").prepend(item);
  while ($("history").children.length > 24) $("history").lastChild.remove();
  open(made, button);
}

function open(made, button) {
  for (const other of $("history").querySelectorAll("button")) other.setAttribute("aria-current", String(other === button));
  state.shown = { made, button };
  const { part, sent, promises } = made;
  show(part, "", false);
  $("image").alt = sent.prompt;
  const about = part.tritium;
  const batch = about.batched > 1 ? `, in a batch of ${about.batched}` : "";
  news(`Done in ${seconds(about.seconds)}${batch}${about.queue_seconds > 0.05 ? ` after ${seconds(about.queue_seconds)} in the queue` : ""}`);
  compare(about.seconds, sent, promises);
  $("facts").textContent = `${about.model} · ${part.size.replace("x", " × ")} · seed ${about.seed} · ${about.steps} steps`;
  $("reuse").disabled = false;
  $("facts").hidden = false;
  $("save").hidden = false;
  $("save").href = source(part);
  $("save").download = `tritium-${about.seed}.${part.output_format}`;
}

function compare(taken, sent, promises) {
  const eager = promises.eager_seconds;
  const same = sent.size === promises.sizes[0] && sent.tritium.steps === promises.steps;
  $("times").hidden = false;
  $("eager-row").hidden = !(eager && same);
  const longest = Math.max(taken, eager && same ? eager : 0);
  $("bar-here").style.width = `${(100 * taken) / longest}%`;
  $("time-here").textContent = seconds(taken);
  if (!eager) $("ratio").textContent = "";
  else if (!same) $("ratio").textContent = `Eager was measured at ${promises.sizes[0].replace("x", " × ")} with ${promises.steps} steps: ${seconds(eager)}.`;
  else {
    $("bar-eager").style.width = `${(100 * eager) / longest}%`;
    $("time-eager").textContent = seconds(eager);
    if (Math.abs(taken / eager - 1) < 0.05) $("ratio").textContent = "as fast as eager";
    else $("ratio").textContent = taken < eager ? `${(eager / taken).toFixed(1)} times as fast as eager` : `${(taken / eager).toFixed(1)} times as long as eager`;
  }
}

function restore() {
  if (state.shown) { open(state.shown.made, state.shown.button); return; }
  $("image").hidden = true;
  $("badge").hidden = true;
  $("hint").hidden = false;
}

function news(text) {
  if ($("news").textContent !== text) $("news").textContent = text;
}

function busy(on) {
  $("go").disabled = on;
  $("stop").hidden = !on;
  $("progress").hidden = !on;
  $("progress").value = 0;
  if (on) for (const id of ["times", "facts", "save"]) $(id).hidden = true;
}

function stop() {
  state.running?.abort.abort();
}

async function poll() {
  try {
    const now = await (await fetch("readyz")).json();
    $("server").className = now.ready ? "ready" : "";
    $("ready").textContent = now.ready ? "ready" : now.why;
    const work = now.queued ? `${now.queued} waiting, about ${seconds(now.queued_seconds)}` : "";
    $("queue").textContent = [now.running ? `${now.running} running` : "", work].filter(Boolean).join(", ");
    if (now.ready && !state.models.length && $("key-field").hidden) await loadModels();
  } catch {
    $("server").className = "";
    $("ready").textContent = "the server does not answer";
    $("queue").textContent = "";
  }
}

$("form").addEventListener("submit", generate);
$("stop").addEventListener("click", stop);
$("steps").addEventListener("input", showSteps);
$("model").addEventListener("change", chooseModel);
$("key").addEventListener("change", () => { problem(""); loadModels(); });
$("reuse").addEventListener("click", () => { $("seed").value = state.shown.made.part.tritium.seed; });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); $("form").requestSubmit(); }
  if (event.key === "Escape") stop();
});
await loadModels();
await poll();
$("prompt").focus();
setInterval(poll, 1000);
