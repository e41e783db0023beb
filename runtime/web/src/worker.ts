/** The script of the worker in which a page runs a model. */

import { Model } from "./load.js";
import type { Port } from "./worker/connection.js";
import { serveModel } from "./worker/host.js";

serveModel(globalThis as unknown as Port, Model.load);
