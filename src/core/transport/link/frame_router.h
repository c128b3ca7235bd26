// SPDX-License-Identifier: BSD-3-Clause
/// Dispatches one link's frames to the channels and the failure detector. Private to `transport/`;
/// under the engine's lock.
#pragma once

#include <memory>

#include "core/transport/channel/channel_table.h"
#include "core/transport/failure/failure_detector.h"

namespace muster::transport {

class FrameRouter final : public LinkEvents {
 public:
  FrameRouter(Link& link, EngineContext& engine, LinkWriter& writer, ChannelTable& channels,
              FailureDetector& detector)
      : link_(link), engine_(engine), writer_(writer), channels_(channels), detector_(detector) {}

  Result<MutableBytes> on_payload(const FrameHeader& header) override;
  Status on_frame(const FrameHeader& header, ConstBytes record) override;
  void on_sent(const std::shared_ptr<void>& owner) override;

 private:
  Result<MutableBytes> on_data_payload(const FrameHeader& header);
  Status on_message(const FrameHeader& header);
  Status on_eager(const FrameHeader& header, ChannelState* channel);
  Status on_request(const FrameHeader& header, ChannelState* channel);
  Status on_clear(const FrameHeader& header);
  Status on_data(const FrameHeader& header);
  Status on_withdraw(const FrameHeader& header);
  Status on_refuse(const FrameHeader& header);
  Status on_channel_failure(const FrameHeader& header, ConstBytes record);
  Status on_rank_failure(const FrameHeader& header, ConstBytes record);
  void on_ping();

  Link& link_;
  EngineContext& engine_;
  LinkWriter& writer_;
  ChannelTable& channels_;
  FailureDetector& detector_;
};

}  // namespace muster::transport
