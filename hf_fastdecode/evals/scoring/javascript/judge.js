// Runs tests whose function is elsewhere: each call becomes a message, and its answer is plain data.
"use strict";

const isEqual = require("./lodash.isequal/index.js");
const { receive, send, encode, decode } = require("./messages.js");

function library(name) {
  if (name !== "lodash") throw new Error(`tests may require lodash only, not ${name}`);
  return { isEqual };
}

function call(...values) {
  send("call", encode(values));
  const [kind, content] = receive();
  if (String(kind) !== "value") throw new Error(String(content));
  return decode(content);
}

function verdict(test, entryPoint, nonce) {
  let run;
  try {
    // Where a test fails, MBXP's message names a variable x that its program lacks.
    run = new Function(entryPoint, "require", "x", test);
  } catch (error) {
    return ["broken", String(error)];
  }
  try {
    run(call, library, undefined);
    return ["pass", "", nonce];
  } catch (error) {
    return ["fail", String(error)];
  }
}

send("started");
for (;;) {
  const [test, entryPoint, nonce] = receive().map(String);
  send(...verdict(test, entryPoint, nonce));
}
