import { defineConfig } from "vitest/config";

process.env["ORT_DISABLE_TELEMETRY"] ??= "1"; // also of the scripts in Python that tests run

export default defineConfig({
  test: {
    include: ["tests/**/*.test.ts"],
    exclude: ["tests/large/**"], // of vitest.large.config.ts
    globalSetup: ["tests/support/models.ts", "tests/support/build.ts"],
    testTimeout: 60_000,
    hookTimeout: 120_000,
    pool: "forks",
    maxWorkers: 2,
  },
});
