// Calls of gRPC by node's own http2, with the settings of other clients and proxies.
//
//     node node_http2.js HOST:PORT CASE < {"infer": HEX, "slow": HEX, "big": HEX}    the messages, as protobuf
//
// Ends with 0 if all was as it should be.
const http2 = require('node:http2');
const assert = require('node:assert');
const {once} = require('node:events');
const {setTimeout: sleep} = require('node:timers/promises');

const [address, name] = process.argv.slice(2);
const messages = Object.fromEntries(
  Object.entries(JSON.parse(require('node:fs').readFileSync(0))).map(([key, hex]) => [key, framed(Buffer.from(hex, 'hex'))]));
const open = [];

function framed(message) {
  const head = Buffer.alloc(5);
  head.writeUInt32BE(message.length, 1);
  return Buffer.concat([head, message]);
}

function connect(options = {}) {
  const session = http2.connect(`http://${address}`, options);
  session.failure = null;
  session.on('error', error => { session.failure = error; });
  open.push(session);
  return session;
}

function begin(session, path = 'ModelInfer', headers = {}) {
  return session.request({
    ':method': 'POST', ':path': `/inference.GRPCInferenceService/${path}`,
    'content-type': 'application/grpc', te: 'trailers', ...headers,
  });
}

// The answer to a call: its status, how many bytes, and the code it was reset with.
function answer(request) {
  return new Promise(resolve => {
    const told = {status: undefined, bytes: 0, error: null};
    const look = headers => { told.status = headers['grpc-status'] ?? told.status; };
    request.on('response', headers => { told.http = headers[':status']; look(headers); });
    request.on('trailers', look);
    request.on('data', data => { told.bytes += data.length; });
    request.on('error', error => { told.error = error; });
    request.on('close', () => resolve({...told, code: request.rstCode}));
  });
}

function ask(session, message = messages.infer, path = 'ModelInfer', headers = {}) {
  const request = begin(session, path, headers);
  request.end(message);
  return answer(request);
}

async function good(...answers) {
  for (const told of await Promise.all(answers)) {
    assert.strictEqual(told.error, null);
    assert.strictEqual(told.status, '0');
    assert(told.bytes > 5);
  }
}

async function answered(settings, options = {}) {
  const session = connect({settings, ...options});
  for (let i = 0; i < 3; i++) await good(ask(session));
  await good(...Array.from({length: 50}, () => ask(session)));
  await good(ask(session, messages.big));
  return session;
}

const settled = session => new Promise((resolve, reject) => session.settings({}, error => error ? reject(error) : resolve()));

const cases = {
  'header table of 0': () => answered({headerTableSize: 0}),
  'header table of 1024': () => answered({headerTableSize: 1024}),
  'header table of 65536': () => answered({headerTableSize: 65536}),
  'frames of 16384': () => answered({maxFrameSize: 16384}),
  'frames of 2^24-1': () => answered({maxFrameSize: 2 ** 24 - 1, initialWindowSize: 2 ** 24}),
  'windows of 2^31-1': () => answered({initialWindowSize: 2 ** 31 - 1}),
  'push': () => answered({enablePush: true}),
  'no push': () => answered({enablePush: false}),
  'one concurrent stream': () => answered({maxConcurrentStreams: 1}),
  'no concurrent stream': () => answered({maxConcurrentStreams: 0}),
  'a header list of 64 kB': () => answered({maxHeaderListSize: 65536}),
  'CONNECT protocol': () => answered({enableConnectProtocol: true}),
  'unknown settings': () => answered({customSettings: {1244: 456}}),
  'padding': () => answered({}, {paddingStrategy: http2.constants.PADDING_STRATEGY_MAX}),
  'aligned padding': () => answered({}, {paddingStrategy: http2.constants.PADDING_STRATEGY_ALIGNED}),

  async 'a window of 1'() {
    await good(ask(connect({settings: {initialWindowSize: 1}})));
  },

  async 'a window of 0 that opens'() {
    const session = connect({settings: {initialWindowSize: 0}});
    const asked = [ask(session), ask(session), ask(session, messages.big)];
    assert.strictEqual(await Promise.race([asked[0], sleep(200, 'waits')]), 'waits');
    session.settings({initialWindowSize: 65535});
    await good(...asked);
  },

  async 'settings that change while calls are open'() {
    const session = connect({maxOutstandingSettings: 50});  // that are not acknowledged
    const asked = Array.from({length: 20}, (_, i) => ask(session, i % 5 ? messages.big : messages.slow));
    for (let i = 0; i < 20; i++) {
      session.settings({headerTableSize: [0, 4096, 100, 65536][i % 4], initialWindowSize: [65535, 1000, 70000][i % 3],
                        maxFrameSize: 16384 + i, enablePush: i % 2 === 0, maxConcurrentStreams: i});
      asked.push(ask(session));
      if (i % 4 === 3) await sleep(5);
    }
    const told = await Promise.all(asked);
    assert(told.every(each => each.error === null && (each.status === '0' || each.status === '14')), JSON.stringify(told));
    await settled(session);
    await good(ask(session));
  },

  async 'GOAWAY while calls are open'() {
    const session = connect();
    await once(session, 'remoteSettings');
    const asked = [ask(session, messages.slow), ask(session)];
    await sleep(50);
    session.goaway(http2.constants.NGHTTP2_NO_ERROR);
    await good(...asked);
  },

  async 'close while calls are open'() {
    const session = connect();
    await once(session, 'connect');
    const asked = [ask(session, messages.slow), ask(session, messages.big)];
    session.close();
    await good(...asked);
    if (!session.destroyed) await once(session, 'close');
    assert.strictEqual(session.failure, null);
  },

  async 'pings'() {
    const session = connect();
    await once(session, 'connect');
    const ping = i => new Promise((resolve, reject) => {
      const payload = Buffer.from(`ping ${i}   `.slice(0, 8));
      session.ping(payload, (error, took, echoed) => error ? reject(error) : resolve(assert.deepStrictEqual(echoed, payload)));
    });
    for (let round = 0; round < 20; round++) await Promise.all(Array.from({length: 10}, (_, i) => ping(i)));  // node's most at once
    await good(ask(session));
  },

  async 'streams given up'() {
    const session = connect();
    await once(session, 'remoteSettings');
    for (let i = 0; i < 300; i++) {
      const request = begin(session, i % 2 ? 'ModelInfer' : 'ModelStreamInfer');
      const told = answer(request);
      if (i % 3 === 0) request.write(messages.infer.subarray(0, 20));
      if (i % 3 === 1) request.end(messages.slow);
      if (i % 10 === 0) await sleep(1);
      request.close(http2.constants.NGHTTP2_CANCEL);
      await Promise.race([told, sleep(1)]);
    }
    await good(ask(session));
  },

  async 'very many calls at once'() {
    const session = connect();
    await good(...Array.from({length: 2500}, () => ask(session)));
  },

  async 'a call on each of many connections'() {
    await good(...Array.from({length: 200}, () => ask(connect())));
  },

  async 'a message in small pieces'() {
    const session = connect();
    const request = begin(session);
    const told = answer(request);
    for (const byte of messages.infer) {
      request.write(Buffer.of(byte));
      if (byte % 16 === 0) await sleep(1);
    }
    request.end();
    await good(told);
  },

  async 'trailers of a client'() {
    const request = connect().request({
      ':method': 'POST', ':path': '/inference.GRPCInferenceService/ModelInfer', 'content-type': 'application/grpc', te: 'trailers',
    }, {waitForTrailers: true});
    request.on('wantTrailers', () => request.sendTrailers({'x-checksum': '1'}));
    const told = answer(request);
    request.end(messages.infer);
    await good(told);
  },

  async 'a stream that ends by halves'() {
    const session = connect();
    const request = begin(session, 'ModelStreamInfer');
    const told = answer(request);
    request.write(messages.infer);
    await once(request, 'data');
    request.write(Buffer.concat([messages.infer, messages.infer]));
    request.end();
    await good(told);
  },

  async 'what is no call'() {
    const session = connect();
    assert.strictEqual((await ask(session, messages.infer, 'ModelInfer', {':method': 'GET'})).http, 415);
    assert.strictEqual((await ask(session, messages.infer, 'ModelInfer', {'content-type': 'application/json'})).http, 415);
    assert.strictEqual((await ask(session, messages.infer, 'ModelInfer', {'content-type': 'application/grpc-web'})).http, 415);
    assert.strictEqual((await ask(session, messages.infer, 'Nothing')).status, '12');
    assert.strictEqual((await ask(session, messages.infer.subarray(1))).status, '3');
    assert.strictEqual((await ask(session, messages.infer, 'ModelInfer', {'x-long': 'x'.repeat(40000)})).status, '8');
    await good(ask(session));
  },

  async 'an answer to who does not read yet'() {
    const session = connect({settings: {initialWindowSize: 2 ** 20}});
    const request = begin(session);
    request.pause();
    const told = answer(request);
    request.pause();
    request.end(messages.big);
    await sleep(100);
    await good(ask(session));
    request.resume();
    await good(told);
  },

  // To the port of REST, which speaks HTTP/1.1.
  async 'REST'() {
    const session = connect();
    const told = await ask(session);
    assert.strictEqual(told.status, undefined);
    assert.match(String(session.failure ?? told.error), /Protocol error|ECONNRESET|ERR_HTTP2/);
  },
};

process.on('uncaughtException', error => { console.error(error); process.exit(1); });
cases[name]().then(() => {
  for (const session of open) session.destroy();
}).catch(error => {
  console.error(error, ...open.map(session => session.failure));
  process.exit(1);
});
