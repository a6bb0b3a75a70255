// Perfetto's own trace processor, from the WebAssembly build of its user interface, without a browser.
//
//   node trace_processor.mjs FOLDER TRACE < queries.json > answers.json
//
// FOLDER holds engine_bundle.js and trace_processor.wasm. The queries are a list of SQL texts; each answer is a list of
// rows, by column. The bundle is written for a web worker: what such a worker has and node has not stands first below.

import fs from 'node:fs';
import path from 'node:path';
import vm from 'node:vm';

const [folder, trace] = process.argv.slice(2);
const CHUNK = 1 << 20;

globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.location = {href: `file://${folder}/engine_bundle.js`};
globalThis.XMLHttpRequest = class {
  open(_, url) { this.file = path.join(folder, path.basename(url)); }
  send() { this.response = new Uint8Array(fs.readFileSync(this.file)).buffer; }
};
Object.defineProperty(process, 'versions', {value: {...process.versions, node: undefined}});
console.log = console.warn = console.error;  // stdout is for the answers

// --- protobuf, as much of perfetto/trace_processor/trace_processor.proto as is asked and answered here

const APPEND = 1, FINALIZE = 2, QUERY = 3;  // TraceProcessorRpc.TraceProcessorMethod
const REQUEST = 2, APPEND_DATA = 101, QUERY_ARGS = 103, APPEND_RESULT = 201, QUERY_RESULT = 203, FINALIZE_RESULT = 212;

function varint(number) {
  const bytes = [];
  for (; number > 127; number = Math.floor(number / 128)) bytes.push((number % 128) | 128);
  return Buffer.from([...bytes, number]);
}
const whole = (field, number) => Buffer.concat([varint(field * 8), varint(number)]);
const block = (field, bytes) => Buffer.concat([varint(field * 8 + 2), varint(bytes.length), bytes]);

function* varints(bytes) {
  for (let at = 0; at < bytes.length;) {
    let value = 0n, shift = 0n, byte;
    do { byte = bytes[at++]; value |= BigInt(byte & 127) << shift; shift += 7n; } while (byte & 128);
    yield BigInt.asIntN(64, value);
  }
}

function* fields(bytes) {
  const view = Buffer.from(bytes.buffer, bytes.byteOffset, bytes.length);
  let at = 0;
  const next = () => {
    let end = at;
    while (view[end] & 128) end++;
    const [value] = varints(view.subarray(at, end + 1));
    at = end + 1;
    return value;
  };
  while (at < view.length) {
    const key = Number(next()), field = key >> 3, wire = key & 7;
    if (wire === 0) yield [field, next()];
    else if (wire === 1) { yield [field, view.subarray(at, at + 8)]; at += 8; }
    else if (wire === 2) { const size = Number(next()); yield [field, view.subarray(at, at + size)]; at += size; }
    else throw new Error(`wire type ${wire}`);
  }
}

function readBatch(batch, cells) {
  const kinds = [], whole = [], real = [], texts = [];
  for (const [field, value] of fields(batch)) {
    if (field === 1) kinds.push(...value);
    else if (field === 2) whole.push(...varints(value));
    else if (field === 3) for (let at = 0; at < value.length; at += 8) real.push(value.readDoubleLE(at));
    else if (field === 5) texts.push(...value.toString('utf8').split('\0'));
  }
  for (const kind of kinds) {
    if (kind === 1) cells.push(null);
    else if (kind === 2) cells.push(Number(whole.shift()));
    else if (kind === 3) cells.push(real.shift());
    else if (kind === 4) cells.push(texts.shift());
    else throw new Error(`a cell of kind ${kind}`);
  }
}

// --- asking

const port = {postMessage: (bytes) => received(Buffer.from(bytes))};
let received;
vm.runInThisContext(fs.readFileSync(path.join(folder, 'engine_bundle.js'), 'utf8'));
self.onmessage({data: port});
let seq = 0;

/** One request; the replies of its kind, until `last` says that this was the last one. */
function ask(method, args, kind, last) {
  return new Promise((resolve, reject) => {
    const replies = [];
    received = (bytes) => {
      for (const [, message] of fields(bytes)) for (const [field, value] of fields(message)) {
        if (field === 5) reject(new Error(value.toString('utf8')));
        if (field === kind) {
          replies.push(value);
          if (last(value)) resolve(replies);
        }
      }
    };
    const message = Buffer.concat([whole(1, ++seq), whole(REQUEST, method), args]);
    port.onmessage({data: new Uint8Array(block(1, message))});
  });
}

async function load() {
  const refuse = (reply, field) => {
    for (const [found, text] of fields(reply)) if (found === field) throw new Error(text.toString('utf8'));
  };
  const file = fs.openSync(trace), chunk = Buffer.alloc(CHUNK);
  for (let size; (size = fs.readSync(file, chunk)) > 0;) {
    const [reply] = await ask(APPEND, block(APPEND_DATA, chunk.subarray(0, size)), APPEND_RESULT, () => true);
    refuse(reply, 2);
  }
  const [reply] = await ask(FINALIZE, Buffer.alloc(0), FINALIZE_RESULT, () => true);
  refuse(reply, 1);
}

async function query(sql) {
  const ended = (reply) => [...fields(reply)].some(([field, batch]) =>
    field === 2 || (field === 3 && [...fields(batch)].some(([flag, value]) => flag === 6 && value)));
  const replies = await ask(QUERY, block(QUERY_ARGS, block(1, Buffer.from(sql))), QUERY_RESULT, ended);
  const names = [], cells = [];
  for (const [field, value] of replies.flatMap((reply) => [...fields(reply)])) {
    if (field === 1) names.push(value.toString('utf8'));
    else if (field === 2) throw new Error(`${sql}: ${value.toString('utf8')}`);
    else if (field === 3) readBatch(value, cells);
  }
  const rows = [];
  for (let at = 0; at < cells.length; at += names.length) {
    rows.push(Object.fromEntries(names.map((name, i) => [name, cells[at + i]])));
  }
  return rows;
}

setTimeout(async () => {  // the module has run what it had queued by then
  try {
    await load();
    const answers = [];
    for (const sql of JSON.parse(fs.readFileSync(0, 'utf8'))) answers.push(await query(sql));
    fs.writeFileSync(1, JSON.stringify(answers));
    process.exit(0);
  } catch (error) {
    console.error(String(error));
    process.exit(1);
  }
}, 0);
