// MoeLayer: chooses the backend and hands out contexts.
#include <string>
#include <utility>

#include "layer/backend.h"
#include "layer/call_context.h"
#include "layer/fingerprint.h"
#include "layer/workspace.h"

namespace megamoe {

CallContext::CallContext() = default;
CallContext::CallContext(std::shared_ptr<CallStatePool> pool, std::unique_ptr<CallState> state)
    : pool_(std::move(pool)), state_(std::move(state)) {}
CallContext::CallContext(CallContext&&) noexcept = default;

CallContext& CallContext::operator=(CallContext&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(state_, other.state_);
  return *this;
}

CallContext::~CallContext() {
  if (state_ != nullptr) pool_->give_back(std::move(state_));
}

std::int64_t CallContext::num_rows() const { return state_ == nullptr ? 0 : state_->num_rows(); }
const std::int64_t* CallContext::rows_per_expert() const {
  return state_ == nullptr ? nullptr : state_->rows_per_expert();
}

struct MoeLayer::Impl {
  LayerConfig config;
  std::shared_ptr<CallStatePool> pool = std::make_shared<CallStatePool>();
  std::unique_ptr<LayerBackend> backend;
};

MoeLayer::MoeLayer(const LayerConfig& config, Communicator& communicator, Workspace& workspace)
    : impl_(std::make_unique<Impl>()) {
  if (&workspace.impl().communicator != &communicator) {
    throw Error(ErrorCode::invalid_argument, "workspace belongs to another communicator");
  }
  agree_on_config(config, communicator);
  const WorkspaceBytes need = workspace_bytes(config, communicator.topology());
  const WorkspaceBytes have = workspace.bytes();
  if (need.symmetric > have.symmetric || need.local > have.local) {
    throw Error(ErrorCode::invalid_argument,
                "workspace is too small: the layer needs " + std::to_string(need.symmetric) +
                    " symmetric and " + std::to_string(need.local) + " local bytes, it has " +
                    std::to_string(have.symmetric) + " and " + std::to_string(have.local));
  }
  if (config.backend != workspace.impl().backend) {
    throw Error(ErrorCode::invalid_argument, "workspace is of another backend than the layer");
  }
  impl_->config = config;
  impl_->backend = make_backend(config, workspace.impl());
}

MoeLayer::MoeLayer(MoeLayer&&) noexcept = default;
MoeLayer& MoeLayer::operator=(MoeLayer&&) noexcept = default;
MoeLayer::~MoeLayer() = default;

CallContext MoeLayer::forward(const ForwardInput& input, const ForwardOutput& output,
                              Stream stream) {
  // Owns the state from here on, so that a call that throws gives it back as well.
  CallContext context(impl_->pool, impl_->pool->take(impl_->backend->capture_of(stream)));
  impl_->backend->forward(context.state_, input, output, stream);
  if (context.state_->is_in_graph()) impl_->pool->add_graph(context.state_->graph);
  return context;
}

void MoeLayer::backward(const CallContext& context, const BackwardInput& input,
                        const BackwardOutput& output, Stream stream) {
  const CallState* state = context.pool_ == impl_->pool ? context.state_.get() : nullptr;
  impl_->backend->backward(state, input, output, stream);
}

void MoeLayer::check(Stream stream) { impl_->backend->check(stream); }

bool MoeLayer::is_in_graph() const { return impl_->pool->has_graph(); }

const LayerConfig& MoeLayer::config() const { return impl_->config; }

}  // namespace megamoe
