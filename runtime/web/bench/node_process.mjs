import { fork } from "node:child_process";
import { join } from "node:path";

/** Start a process with one model of one engine. Return `run`, which sends a request and returns its result, and `end`. */
export async function startProcess(engine, path, precision, device, threads) {
  const options = [engine, path, precision, device, String(threads)];
  const child = fork(join(import.meta.dirname, "node_worker.mjs"), options, { serialization: "advanced" });
  const ended = new Promise((_, fail) => {
    child.once("exit", (code) => fail(new Error(`${engine} ended with code ${code}`)));
  });
  ended.catch(() => {}); // a request throws it; none waits at the end
  const reply = () => Promise.race([new Promise((done) => child.once("message", done)), ended]);
  await reply();
  const run = (request) => {
    const result = reply();
    child.send(request);
    return result;
  };
  return { run, end: async () => child.kill() };
}
