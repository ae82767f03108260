// Calls of gRPC by @grpc/grpc-js.
//
//     NODE_PATH=FOLDER/node_modules node grpc_js.js HOST:PORT DESCRIPTORS CASE
//
// DESCRIPTORS: a file with the FileDescriptorSet of inference, health and reflection. Ends with 0 if all was as it should be.
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');
const assert = require('node:assert');
const fs = require('node:fs');
const {setTimeout: sleep} = require('node:timers/promises');

const [address, descriptors, name] = process.argv.slice(2);
const {inference, grpc: own} = grpc.loadPackageDefinition(
  loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(descriptors), {keepCase: true, longs: Number, defaults: true, oneofs: true}));
const {status} = grpc;
const open = [];

function connect(options = {}, Service = inference.GRPCInferenceService) {
  const client = new Service(address, grpc.credentials.createInsecure(), {'grpc.use_local_subchannel_pool': 1, ...options});
  open.push(client);
  return client;
}

function message(model = 'echo', id = '', count = 4, value = 7) {
  return {
    model_name: model, id, inputs: [{name: 'INPUT0', datatype: 'FP32', shape: [1, count]}],
    raw_input_contents: [Buffer.from(new Float32Array(count).fill(value).buffer)],
  };
}

// A unary call: its reply, or its error, with the trailers.
function ask(client, method, request, {metadata = new grpc.Metadata(), ...options} = {}) {
  return new Promise(resolve => {
    const told = {};
    const call = client[method](request, metadata, options, (error, reply) => Object.assign(told, {error, reply}));
    call.on('metadata', metadata => { told.metadata = metadata; });
    call.on('status', end => { told.status = end; setImmediate(resolve, told); });
    told.call = call;
  });
}

async function good(client, request = message()) {
  const {error, reply} = await ask(client, 'ModelInfer', request);
  assert.strictEqual(error, null);
  assert.deepStrictEqual(reply.raw_output_contents[0], request.raw_input_contents[0]);
  return reply;
}

async function fails(client, code, text, request, options) {
  const told = await ask(client, 'ModelInfer', request, options);
  assert(told.error, 'expected an error');
  assert.strictEqual(told.error.code, code, String(told.error));
  assert.match(told.error.details, text);
  return told;
}

// A stream: its replies, and its end.
function stream(client, method = 'ModelStreamInfer', options = {}) {
  const call = client[method](new grpc.Metadata(), options);
  const replies = [];
  call.on('data', reply => replies.push(reply));
  call.on('error', () => {});
  const end = new Promise(resolve => call.on('status', resolve));
  return {call, replies, end};
}

async function compressed(algorithm) {
  const client = connect({'grpc.default_compression_algorithm': algorithm});
  await good(client);
  await good(client, message('echo', '', 500_000));
  const {call, replies, end} = stream(client);
  for (let i = 0; i < 20; i++) call.write(message('echo', String(i), i % 7 ? 4 : 50_000));
  call.end();
  assert.strictEqual((await end).code, status.OK);
  assert.deepStrictEqual(replies.map(reply => reply.infer_response.id), Array.from({length: 20}, (_, i) => String(i)));
}

const cases = {
  async unary() {
    const client = connect();
    assert.strictEqual((await good(client, message('echo', 'a'))).id, 'a');
    assert((await ask(client, 'ServerLive', {})).reply.live);
    assert((await ask(client, 'ModelReady', {name: 'echo'})).reply.ready);
    assert.strictEqual((await ask(client, 'ModelMetadata', {name: 'echo'})).reply.inputs[0].name, 'INPUT0');
    assert.strictEqual((await ask(client, 'RepositoryIndex', {})).reply.models.length, 2);
    await good(client, message('echo', '', 1_000_000));
    await Promise.all(Array.from({length: 2000}, () => good(client)));
  },

  async errors() {
    const client = connect();
    const {status: end} = await fails(client, status.NOT_FOUND, /Request for unknown model: 'nobody ü%' is not found/, message('nobody ü%'));
    assert.deepStrictEqual(end.metadata.getMap(), {'content-type': 'application/grpc', 'grpc-accept-encoding': 'identity,deflate,gzip'});
    await fails(client, status.INVALID_ARGUMENT, /unexpected total byte size 16 for input 'INPUT0'/, {...message(), inputs: [{name: 'INPUT0', datatype: 'FP32', shape: [1, 5]}]});
    await fails(client, status.INTERNAL, /./, message('echo', '', 4, 666));
    const {error} = await ask(client, 'RepositoryModelLoad', {model_name: 'echo'});
    assert.strictEqual(error.code, status.UNIMPLEMENTED);
    await good(client, message('slow'));  // from now on it is known how long one takes
    const told = await Promise.all(Array.from({length: 20}, () => ask(client, 'ModelInfer', message('slow'))));
    const refused = told.filter(each => each.error);
    assert(refused.length > 0 && refused.length < 20);
    for (const {error} of refused) {
      assert.strictEqual(error.code, status.UNAVAILABLE);
      assert(Number(error.metadata.get('retry-after')[0]) > 0);
      assert(Number(error.metadata.get('grpc-retry-pushback-ms')[0]) > 0);
    }
  },

  async retries() {
    const client = connect({'grpc.enable_retries': 1, 'grpc.service_config': JSON.stringify({methodConfig: [{name: [{}], retryPolicy: {
      maxAttempts: 5, initialBackoff: '0.1s', maxBackoff: '0.3s', backoffMultiplier: 2, retryableStatusCodes: ['UNAVAILABLE']}}]})});
    await Promise.all(Array.from({length: 6}, () => good(client, message('slow'))));
  },

  async stream() {
    const {call, replies, end} = stream(connect());
    const ids = Array.from({length: 300}, (_, i) => String(i));
    for (const id of ids) call.write(message(id % 100 === 50 ? 'slow' : id % 50 === 7 ? 'nobody' : 'echo', id, id % 10 ? 4 : 20_000));
    call.end();
    assert.strictEqual((await end).code, status.OK);
    assert.deepStrictEqual(replies.map(reply => reply.infer_response.id), ids);
    assert.deepStrictEqual(replies.filter(reply => reply.error_message).map(reply => reply.infer_response.id),
                           ids.filter(id => id % 50 === 7 && id % 100 !== 50));
  },

  async 'a stream cancelled in the middle'() {
    const client = connect();
    const {call, replies, end} = stream(client);
    for (let i = 0; i < 10; i++) call.write(message(i < 2 ? 'echo' : 'slow', String(i)));
    while (replies.length < 2) await sleep(5);
    call.cancel();
    assert.strictEqual((await end).code, status.CANCELLED);
    assert.strictEqual(replies.length, 2);
    await good(client);
  },

  async 'a call cancelled'() {
    const client = connect();
    const asked = Array.from({length: 4}, () => new Promise(resolve => {
      const call = client.ModelInfer(message('slow'), error => resolve(error));
      setTimeout(() => call.cancel(), 50);
    }));
    for (const error of await Promise.all(asked)) assert.strictEqual(error.code, status.CANCELLED);
    await good(client);
  },

  async deadlines() {
    const client = connect();
    await fails(client, status.DEADLINE_EXCEEDED, /./, message('slow'), {deadline: Date.now() + 100});
    const {end} = (() => { const it = stream(client, 'ModelStreamInfer', {deadline: Date.now() + 100}); it.call.write(message('slow')); return it; })();
    assert.strictEqual((await end).code, status.DEADLINE_EXCEEDED);
    for (const deadline of [Infinity, Date.now() + 1e12, Date.now() + 5000]) {
      assert.strictEqual((await ask(client, 'ServerLive', {}, {deadline})).error, null);
    }
  },

  deflate: () => compressed(grpc.compressionAlgorithms.deflate),
  gzip: () => compressed(grpc.compressionAlgorithms.gzip),

  async metadata() {
    const client = connect();
    for (const [size, code] of [[1000, status.OK], [7000, status.OK], [30_000, status.OK], [50_000, status.RESOURCE_EXHAUSTED]]) {
      const metadata = new grpc.Metadata();
      metadata.set('x-long', 'x'.repeat(size));
      metadata.set('x-bytes-bin', Buffer.from([0, 255, 10, 13]));
      const {error} = await ask(client, 'ServerLive', {}, {metadata});
      assert.strictEqual(error?.code ?? status.OK, code, `${size}: ${error}`);
      if (error) assert.match(error.details, /server\.limits\.header_bytes/);
    }
    await good(client);
    await fails(connect({'grpc.max_metadata_size': 100}), status.NOT_FOUND, /./, message('nobody'));
  },

  async 'small messages only'() {
    const client = connect({'grpc.max_receive_message_length': 10});
    await fails(client, status.RESOURCE_EXHAUSTED, /larger than max/, message());
    assert((await ask(client, 'ServerLive', {})).reply.live);
    await fails(connect({'grpc.max_send_message_length': 10}), status.RESOURCE_EXHAUSTED, /larger/, message());
  },

  async 'a message over the limit'() {
    const client = connect({'grpc.max_send_message_length': -1});
    await fails(client, status.INVALID_ARGUMENT, /server\.limits\.body_bytes/, message('echo', '', 17 << 20));
    await good(client);
  },

  async keepalive() {
    const client = connect({'grpc.keepalive_time_ms': 20, 'grpc.keepalive_timeout_ms': 2000, 'grpc.keepalive_permit_without_calls': 1});
    await good(client);
    await sleep(600);
    const {call, replies, end} = stream(client);
    call.write(message());
    await sleep(600);
    call.write(message('slow'));
    call.end();
    assert.strictEqual((await end).code, status.OK);
    assert.strictEqual(replies.length, 2);
  },

  async 'flow control windows'() {
    for (const window of [65535, 1 << 20, 2 ** 31 - 1]) {
      const client = connect({'grpc-node.flow_control_window': window, 'grpc-node.max_session_memory': 100});
      await Promise.all(Array.from({length: 8}, () => good(client, message('echo', '', 200_000))));
    }
  },

  async 'a client that reads slowly'() {
    const client = connect();
    const call = client.ModelStreamInfer();
    const ids = [];
    call.pause();
    call.on('data', reply => { ids.push(reply.infer_response.id); });
    const end = new Promise(resolve => call.on('status', resolve));
    for (let i = 0; i < 50; i++) call.write(message('echo', String(i), 100_000));
    call.end();
    await sleep(300);
    await good(client);
    call.resume();
    assert.strictEqual((await end).code, status.OK);
    assert.deepStrictEqual(ids, Array.from({length: 50}, (_, i) => String(i)));
  },

  async health() {
    const client = connect({}, own.health.v1.Health);
    for (const service of ['', 'inference.GRPCInferenceService']) {
      assert.strictEqual((await ask(client, 'Check', {service})).reply.status, 1);
    }
    assert.strictEqual((await ask(client, 'Check', {service: 'nothing'})).error.code, status.NOT_FOUND);
    const call = client.Watch({service: ''});
    const first = await new Promise(resolve => call.on('data', resolve));
    assert.strictEqual(first.status, 1);
    const end = new Promise(resolve => call.on('status', resolve));
    call.on('error', () => {});
    call.cancel();
    assert.strictEqual((await end).code, status.CANCELLED);
  },

  async reflection() {
    for (const version of ['v1', 'v1alpha']) {
      const client = connect({}, own.reflection[version].ServerReflection);
      const {call, replies, end} = stream(client, 'ServerReflectionInfo');
      call.write({list_services: ''});
      call.write({file_containing_symbol: 'inference.GRPCInferenceService'});
      call.write({file_containing_symbol: 'nothing.Here'});
      call.end();
      assert.strictEqual((await end).code, status.OK);
      assert(replies[0].list_services_response.service.some(each => each.name === 'inference.GRPCInferenceService'));
      assert(replies[1].file_descriptor_response.file_descriptor_proto.length >= 1);
      assert.strictEqual(replies[2].error_response.error_code, status.NOT_FOUND);
    }
  },

  // Prints what it sees of an error, for a comparison with what another server gives.
  async 'seen of an error'() {
    const {error, metadata, status: end} = await ask(connect(), 'ModelInfer', message('nobody'));
    const trailers = error.metadata.getMap();
    console.log(JSON.stringify({code: error.code, details: error.details, message: error.message, trailers, end: end.code,
                                headers: metadata === undefined ? null : metadata.getMap()}));
  },

  // To the port of REST, which speaks HTTP/1.1.
  async REST() {
    await fails(connect(), status.UNAVAILABLE, /./, message(), {deadline: Date.now() + 5000});
  },
};

cases[name]().then(() => {
  for (const client of open) client.close();
}).catch(error => {
  console.error(error);
  process.exit(1);
});
