/**
 * The browsers of tests of pages: those of the system (`apt-get install chromium firefox-esr`), or of the variables CHROMIUM
 * and FIREFOX. Tests of a browser that is not installed are skipped.
 */

import { existsSync } from "node:fs";
import { join } from "node:path";
import type { SupportedBrowser } from "puppeteer-core";

const FOLDERS = ["/usr/bin", "/usr/local/bin", "/snap/bin"];

export const CHROMIUM = process.env["CHROMIUM"] ?? installed("chromium", "chromium-browser", "google-chrome");
export const FIREFOX = process.env["FIREFOX"] ?? installed("firefox-esr", "firefox");

/** Those that tests of pages run in. */
export const BROWSERS: readonly [name: string, kind: SupportedBrowser, path: string | undefined][] = [
  ["Chromium", "chrome", CHROMIUM],
  ["Firefox", "firefox", FIREFOX],
];

function installed(...names: string[]): string | undefined {
  return FOLDERS.flatMap((folder) => names.map((name) => join(folder, name))).find(existsSync);
}

/** Arguments of Chromium for WebGPU without a GPU: its own adapter SwiftShader, which computes on the CPU. */
export const SOFTWARE_WEBGPU = [
  "--no-sandbox",
  "--enable-unsafe-webgpu",
  "--use-webgpu-adapter=swiftshader",
  "--enable-features=Vulkan",
  "--use-vulkan=swiftshader",
  "--use-angle=swiftshader",
  "--ignore-gpu-blocklist",
];
