// SPDX-License-Identifier: BSD-3-Clause
/// `muster run --metrics`: the numbers of a node's ranks, for Prometheus.
///
/// `scrape_server.h` serves the page, `families.h` writes it of what `node_metrics.h` has looked at
/// and `call_totals.h` has summed up.
#pragma once

#include <memory>
#include <string>

#include "core/net/socket_address.h"
#include "faces/cli/metrics/scrape_server.h"
#include "jobs/launch/node_numbers.h"
#include "muster/status.h"

namespace muster::cli {

/// "9464" and "localhost:9464" are of the loopback interface; "0.0.0.0:9464" and "[::]:9464" of
/// all. Port 0 takes a free one. Names are refused: they may lead to other interfaces tomorrow.
Result<SocketAddress> parse_metrics_address(const std::string& text);

/// The token that opens the metrics of the job whose secret, or observers' key, is in the
/// environment. It tells nothing of either, so it may travel over plain HTTP.
Result<std::string> metrics_token();

/// Serves the metrics until the server goes. Away from the loopback interface a secret must be in
/// the environment; it is read here, before the launcher wipes it.
Result<std::unique_ptr<ScrapeServer>> serve_metrics(
    const SocketAddress& address, std::shared_ptr<const launch::NodeNumbers> numbers);

}  // namespace muster::cli
