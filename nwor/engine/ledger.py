"""The ledger of every change to vLLM's own classes, modules and objects.

Anything that a seam can do is not done so. Each change is made by the module that its entry names. A test
holds the ledger against the sources.
"""

from __future__ import annotations

from dataclasses import dataclass

_COMPLETION = "vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion"
_CHAT = "vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat"
_PASSES = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator"


@dataclass(frozen=True)
class Patch:
    """One entry of the ledger.

    Attributes:
        target: dotted path of what is replaced; of single objects, their class or what of it is replaced.
        why: what cannot be had otherwise.
        how: what the replacement does.
        removal: when the patch can go.
        where: the module that makes the change.

    """

    target: str
    why: str
    how: str
    removal: str
    where: str = "nwor.engine.patches"


LEDGER = (
    Patch(
        target="vllm.platforms.current_platform.check_and_update_config",
        why="plain `vllm serve` has to get the NWOR worker from its additional_config alone",
        how="calls the original; where NWOR is asked for, exchanges the stock worker class and names the "
        "scheduler that gathers figures, if none is named",
        removal="when vLLM lets a general plugin see or change a VllmConfig before workers start",
    ),
    Patch(
        target="vllm.v1.worker.cpu_worker.CPUModelRunner",
        why="CPUWorker.init_device names the runner class itself and does not call _make_model_runner",
        how="names the NWOR subclass instead, while the worker of an engine that asked for NWOR starts",
        removal="when CPUWorker builds its runner through _make_model_runner as the GPU worker does",
    ),
    Patch(
        target="vllm.v1.worker.cpu.model_runner.CPUModelRunner",
        why="CPUWorker.init_device names runner V2, too, which it takes where Triton knows the CPU",
        how="names the NWOR subclass instead, while the worker of an engine that asked for NWOR starts",
        removal="with the entry before",
    ),
    Patch(
        target="vllm.v1.engine.EngineCoreOutput",
        why="a request's windows have to reach the front end beside its acceptance figures",
        how="annotates spec_decode_metrics with a subclass of two more fields, which the decoder then fills",
        removal="when vLLM carries a plugin's own figures of a request",
        where="nwor.engine.stats.figures",
    ),
    Patch(
        target="vllm.v1.engine.EngineCoreOutputs",
        why="the engine's counters have to reach the front end that serves /metrics",
        how="annotates scheduler_stats with a subclass of one more field, which the decoder then fills",
        removal="when vLLM carries a plugin's own scheduler statistics",
        where="nwor.engine.stats.figures",
    ),
)

#: Single objects that vLLM has made, in an engine that asked for NWOR.
OBJECT_LEDGER = (
    Patch(
        target="vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager",
        why="runner V2 makes its graph manager itself, and a second set of graphs has to be kept beside it",
        how="the manager, freshly made, becomes a subclass that picks the set of the mode at each replay",
        removal="when the runner takes a graph manager's class from a setting",
        where="nwor.engine.cuda_graphs.v2",
    ),
    Patch(
        target="vllm.v1.worker.gpu.cudagraph_utils.ModelCudaGraphManager.capture",
        why="vLLM measures what its graphs take by capturing some, and mixed steps' have to be among them",
        how="the manager of that measurement, freshly made, becomes a subclass that captures them too",
        removal="when a plugin can tell what its own graphs take",
        where="nwor.engine.cuda_graphs.v2",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager",
        why="drafters make their graph manager themselves, and their first pass has a graph for mixed steps",
        how="the manager, freshly made, becomes a subclass that follows the target's choice of a mixed graph",
        removal="when a drafter takes a graph manager's class from a setting",
        where="nwor.engine.cuda_graphs.draft",
    ),
    Patch(
        target=f"{_PASSES}._run_model",
        why="the drafter's first pass runs its model for rows and its head for requests, in one method",
        how="on the speculator alone, while what the pass does for each request is captured or launched; "
        "gives the hidden states that a graph of the model has left",
        removal="when the pass is two methods",
        where="nwor.engine.cuda_graphs.draft",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager.capture",
        why="the drafter's passes need graphs for every number of drafts that may be chosen",
        how="the manager becomes a subclass, which captures them",
        removal="when vLLM captures them for other numbers than its schedule has",
        where="nwor.engine.cuda_graphs.draft",
    ),
    Patch(
        target="vllm.compilation.cuda_graph.CUDAGraphWrapper",
        why="runner V1 wraps the model in a class that it names itself",
        how="the wrapper becomes a subclass that keeps a second set of graphs",
        removal="when the runner takes the wrapper's class from a setting",
        where="nwor.engine.cuda_graphs.v1",
    ),
    Patch(
        target="vllm.v1.core.kv_cache_manager.KVCacheManager",
        why="the scheduler makes its cache manager itself, and `fast_host` shortens two of its methods",
        how="the manager becomes a subclass, where it and all that it holds are the known classes, and what "
        "the two stand for has the known sources",
        removal="when allocating a block that is there costs no more than that",
        where="nwor.engine.fastpath.kv_cache_manager",
    ),
    Patch(
        target="vllm.v1.core.sched.output.SchedulerOutput",
        why="pipeline stages have to know how many steps are under way, and the scheduler what windows did",
        how="it carries that number as one more attribute, and ModelRunnerOutput the step's record; stock "
        "code looks at neither",
        removal="when vLLM lets a scheduler send a plugin's own data to workers",
        where="nwor.engine.stats.step_messages",
    ),
    Patch(
        target="vllm.v1.outputs.AsyncModelRunnerOutput.get_output",
        why="a step's windows can be counted only once its sampled tokens are on the host",
        how="the object's own method counts them after vLLM's, and then goes",
        removal="when the runner has a hook for outputs that have arrived",
        where="nwor.engine.model_runner.common",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler",
        why="runner V2 makes its rejection sampler itself, which knows windows as chains alone",
        how="the runner's own becomes a subclass that walks trees; only where the sources are the known ones",
        removal="when the runner takes a rejection sampler's class from a setting",
        where="nwor.engine.trees.decoding",
    ),
    Patch(
        target="vllm.v1.worker.gpu.structured_outputs.StructuredOutputsWorker",
        why="its masks have rows for the longest window of every request: a GiB where windows may be trees",
        how="its two buffers are made anew, with as many rows as a step can have",
        removal="when vLLM bounds them by max_num_batched_tokens",
        where="nwor.engine.trees.decoding",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.propose",
        why="the drafter has to read the accepted rows of a tree, and give back the nodes of the next",
        how="on the speculator alone, puts the step's rows in order, calls the original, ranks candidates",
        removal="when vLLM drafts trees",
        where="nwor.engine.trees.speculator",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft",
        why="of each pass of the drafter vLLM keeps the likeliest token alone",
        how="on the speculator alone, keeps the runners-up and their log-probabilities too",
        removal="with the entry before",
        where="nwor.engine.trees.speculator",
    ),
    Patch(
        target=f"{_PASSES}._generate_fused_drafts",
        why="vLLM runs a pass for each draft token, and a tree has more nodes than levels",
        how="on the speculator alone, as many passes as the tree is deep; a grown tree's are over its levels",
        removal="with the entries before",
        where="nwor.engine.trees.speculator",
    ),
    Patch(
        target=f"{_PASSES}._generate_draft",
        why="as before; vLLM captures and runs it where passes are not fused",
        how="likewise",
        removal="with the entries before",
        where="nwor.engine.trees.speculator",
    ),
    Patch(
        target=f"{_PASSES}._multi_step_decode",
        why="as before; it builds metadata anew for each pass, which a level's nodes do not fit",
        how="likewise; where the tree grows, vLLM's method for fused passes runs instead",
        removal="with the entries before",
        where="nwor.engine.trees.speculator",
    ),
)

#: Requests that fail alone, and adapters under a drafter.
FAULT_LEDGER = (
    Patch(
        target="vllm.v1.outputs.AsyncModelRunnerOutput.get_output",
        why="which requests of a step failed is known to the worker alone until its output is on the host",
        how="the object's own method adds them to vLLM's result, and then goes",
        removal="when an output can carry errors of single requests",
        where="nwor.engine.request_isolation.common",
    ),
    Patch(
        target="vllm.v1.structured_output.StructuredOutputManager",
        why="an exception in one request's grammar ends the engine, and control tokens pass for text",
        how="the manager becomes a subclass that traces the exception, and masks control tokens",
        removal="when vLLM ends such a request alone, and no grammar's string matches a control token",
        where="nwor.engine.request_isolation.grammars",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.propose",
        why="an exception in drafting ends the engine, and no seam of runner V2 lies before it",
        how="on the speculator alone; the step goes without drafts",
        removal="when vLLM goes on without drafts",
        where="nwor.engine.request_isolation.v2",
    ),
    Patch(
        target="vllm.v1.worker.gpu.sample.prompt_logprob.PromptLogprobsWorker.compute_prompt_logprobs",
        why="an exception in one request's log-probabilities ends the engine, in runner V2",
        how="on the worker alone; requests are tried by themselves",
        removal="when vLLM ends such a request alone",
        where="nwor.engine.request_isolation.v2",
    ),
    Patch(
        target="vllm.lora.layers.base.BaseLayerWithLoRA",
        why="a drafter's rows do not fit the adapters around layers that it shares: the engine dies",
        how="the drafter's own references become the layers without their adapters",
        removal="when vLLM's drafters take them off themselves",
        where="nwor.engine.workarounds.adapters",
    ),
    Patch(
        target="vllm.lora.ops.torch_ops.lora_ops.bgmv_shrink",
        why="on a CPU rows without adapter, index -1, take the last adapter's weights",
        how="this, bgmv_expand and bgmv_expand_slice get zeros for such rows",
        removal="when vLLM's CPU operators leave them as they are",
        where="nwor.engine.workarounds.adapters",
    ),
)

#: What the server exchanges in its own processes; tests/server/test_vllm_faults.py shows what for.
SERVER_FAULT_LEDGER = (
    Patch(
        target="vllm.v1.engine.async_llm.AsyncLLM.generate",
        why="a stream's parameters are checked after its status went out, and some not at all",
        how="on the client alone; checks, then calls the original",
        removal="when vLLM checks before it answers, and refuses what it cannot do under speculation",
        where="server.api.admission",
    ),
    Patch(
        target="vllm.entrypoints.openai.responses.serving.OpenAIServingResponses.create_responses",
        why="a stream of the responses API calls the engine after its status went out",
        how="on the serving object alone; checks a request's bound of draft tokens, then calls the original",
        removal="with the entry before",
        where="server.api.admission",
    ),
    Patch(
        target="vllm.v1.engine.output_processor.OutputProcessor",
        why="aborts are not counted, tokens past a stop string are, errors have no words, and echo of an "
        "aborted prompt finds too few log-probabilities",
        how="the client's own becomes a subclass",
        removal="when vLLM counts both rightly, carries an error's message and echoes aborted prompts",
        where="server.api.output_processor",
    ),
    Patch(
        target="vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion",
        why="echo drops the prompt where token ids are asked for; beam search ignores what it is asked",
        how="methods of the serving object are wrapped",
        removal="when vLLM's echo and beam search do as they are asked",
        where="server.api.mended_answers",
    ),
    Patch(
        target="vllm.entrypoints.generate.beam_search.online.BeamSearchOnlineMixin.beam_search",
        why="a beam runs through end tokens other than the tokenizer's own",
        how="on the serving objects; log-probabilities of further end tokens are shown as the known one's",
        removal="when vLLM's beam search takes the model's end tokens",
        where="server.api.beam_search",
    ),
    Patch(
        target="vllm.entrypoints.openai.responses.serving.OpenAIServingResponses",
        why="a stream that its limit cut says that it is complete",
        how="the last event is exchanged on its way out",
        removal="when vLLM sends response.incomplete",
        where="server.api.mended_answers",
    ),
)

#: What `fast_host`, `fast_sampling` and `fast_drafting` exchange in the worker process of an engine that
#: asked for NWOR; see the modules named.
FAST_PATH_LEDGER = (
    Patch(
        target="vllm.v1.worker.gpu.model_runner.async_tensor_h2d",
        why="two inputs that seldom change are sent to the GPU in each step",
        how="fastpath.h2d_cache: sends again what has changed; only where the sources are the known ones",
        removal="when model runner V2 keeps them on the device",
        where="nwor.engine.fastpath.h2d_cache",
    ),
    Patch(
        target="vllm.v1.worker.gpu.input_batch._post_update_kernel",
        why="Triton works the way from arguments to compiled kernel anew in each launch",
        how="fastpath.triton_launch: gives this and each other Triton kernel of vllm.v1.worker.gpu a "
        "`run` of its own, on the kernel object alone, that remembers the way",
        removal="when Triton's launches cost no more",
        where="nwor.engine.fastpath.triton_launch",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator.sample_draft",
        why="the drafter's argmax leaves most of the GPU idle with few rows, and no seam lies before it",
        how="fastpath.greedy_sampling: on the speculator alone, takes nwor.argmax_rows for it and leaves "
        "other ways to draft to the original; only where the original's source is the known one",
        removal="when vLLM's argmax of a few rows of logits fills the GPU",
        where="nwor.engine.fastpath.greedy_sampling",
    ),
    Patch(
        target="vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler._verify",
        why="greedy batches pass through kernels made for random ones, and no seam lies before them",
        how="fastpath.greedy_sampling: on the sampler alone, and for greedy batches alone, takes "
        "nwor.argmax_rows and one small kernel; only where what it stands for has the known sources",
        removal="when vLLM has a way of its own for greedy batches",
        where="nwor.engine.fastpath.greedy_sampling",
    ),
    Patch(
        target=f"{_PASSES}._prefill",
        why="the drafter's first pass runs all of its model for rows whose keys and values alone are read",
        how="fastpath.first_pass: on the speculator alone, runs the model up to its last layer's keys and "
        "values, then the original for one row of each request; only where the sources are the known ones",
        removal="when vLLM runs a drafter's layers behind the last attention for last rows alone",
        where="nwor.engine.fastpath.first_pass",
    ),
    Patch(
        target=f"{_PASSES}._run_model",
        why="the second part runs the model for last rows, and `_prefill` runs it for all",
        how="fastpath.first_pass: on the speculator alone, within a call of the original `_prefill`",
        removal="with the entry before",
        where="nwor.engine.fastpath.first_pass",
    ),
    Patch(
        target=f"{_PASSES}.capture",
        why="pieces that are captured have to be all, and no argument of `_prefill` says that it is captured",
        how="fastpath.first_pass: on the speculator alone, notes that the original runs",
        removal="with the entry before",
        where="nwor.engine.fastpath.first_pass",
    ),
)

#: Faults of stock vLLM that are mended in the worker's process on a CPU: with NWOR, and under `nwor-server`
#: without it as well.
MENDS_LEDGER = (
    Patch(
        target="vllm.v1.worker.cpu_model_runner.CPUModelRunner._sample",
        why="for a seeded request whose prompt takes several steps vLLM turns the generator back by an "
        "offset, which CPU generators do not have: the engine dies",
        how="puts the generators' states back after sampling",
        removal="when vLLM asks for a generator's kind before it does so (a unit test fails on that day)",
        where="nwor.engine.workarounds.cpu_generators",
    ),
    Patch(
        target="vllm.v1.worker.cpu_model_runner.CPUModelRunner._bookkeeping_sync",
        why="the entry before",
        how="hides those generators while vLLM would turn them back",
        removal="with the entry before",
        where="nwor.engine.workarounds.cpu_generators",
    ),
    Patch(
        target="vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._sample_from_logits",
        why="sampled drafts of a seeded request differ from run to run, and so do its tokens; nor are top_k "
        "and top_p looked at (model runner V1, on GPUs with NWOR too)",
        how="draws with generators derived from the requests' own, from what top_k and top_p leave",
        removal="when vLLM's V1 draws drafts by seed",
        where="nwor.engine.workarounds.sampled_drafts",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states",
        why="probabilities of sampled drafts are those of the last pass: where a request sits a step out "
        "they are gone, and the tokens of the whole batch depend on who else is there",
        how="keeps them until the request verifies its drafts",
        removal="when vLLM's V1 keeps them with the request",
        where="nwor.engine.workarounds.sampled_drafts",
    ),
    Patch(
        target="vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_spec_decode_draft_probs",
        why="as of _update_states",
        how="finds kept ones, and takes drafts that were not drawn for certain, each request for itself",
        removal="when vLLM's V1 keeps them with the request",
        where="nwor.engine.workarounds.sampled_drafts",
    ),
    Patch(
        target="vllm.utils.cpu_triton_utils._expand_kernel_impl",
        why="vLLM's CPU implementation fills a copy: chance is temperature, top_p and top_k of verify steps",
        how="one that fills outputs of any type; with NWOR, and under nwor-server without it",
        removal="when vLLM's implementation fills outputs of any type (a unit test fails on that day)",
        where="nwor.engine.workarounds.cpu_expand",
    ),
    Patch(
        target="vllm.v1.worker.cpu_model_runner.CPUModelRunner.load_model",
        why="the drafter gets the target's layers with adapters around them",
        how="the drafter's own references become the layers without their adapters; under nwor-server alone",
        removal="when vLLM's drafters take them off themselves",
        where="server.cpu_sampling",
    ),
)

#: What `nwor-server` exchanges in its own process, with and without NWOR.
SERVER_LEDGER = (
    Patch(
        target="vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware",
        why="vLLM answers a wrong API key with a body of its own",
        how="the application's middleware is named as a subclass that answers with OpenAI's body",
        removal="when vLLM's refusal has OpenAI's body",
        where="server.api.http_errors",
    ),
    Patch(
        target=f"{_COMPLETION}.completion_stream_generator",
        why="a stream without a usage chunk has no acceptance figures, and no answer has NWOR's",
        how="on the serving object alone, adds them to the stream's last chunk",
        removal="when vLLM lets a plugin add to an answer's metrics",
        where="server.api.acceptance",
    ),
    Patch(
        target=f"{_CHAT}.chat_completion_stream_generator",
        why="as before, for chat",
        how="the same function as before",
        removal="with the entry before",
        where="server.api.acceptance",
    ),
    Patch(
        target=f"{_COMPLETION}.request_output_to_completion_response",
        why="no whole answer has NWOR's figures",
        how="on the serving object alone, adds them to the answer",
        removal="with the entries before",
        where="server.api.acceptance",
    ),
    Patch(
        target=f"{_CHAT}.chat_completion_full_generator",
        why="as before, for chat",
        how="likewise",
        removal="with the entries before",
        where="server.api.acceptance",
    ),
    Patch(
        target="vllm.entrypoints.openai.responses.serving.OpenAIServingResponses.responses_full_generator",
        why="answers of the responses API have neither figures",
        how="on the serving object alone, adds both",
        removal="when vLLM adds acceptance there, and with the entries before",
        where="server.api.acceptance",
    ),
    Patch(
        target="vllm.v1.engine.output_processor.RequestOutputCollector",
        why="a front end that is behind its engine writes each piece of each stream, and new requests wait",
        how="the class of a stream's collector becomes a subclass, which merges pieces while that is so",
        removal="when vLLM merges pieces by how late they are",
        where="server.api.stream_pacing",
    ),
)
