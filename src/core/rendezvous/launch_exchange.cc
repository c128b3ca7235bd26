#include "core/rendezvous/launch_exchange.h"

namespace muster::store {

std::string exchange_detail::next_key() {
  static int count = 0;
  return "muster-" + std::to_string(count++);
}

Result<std::string> share_from_rank_zero(SchedulerRanks::AddressExchange kind, int rank,
                                         std::string_view text, TimePoint deadline) {
  switch (kind) {
    case SchedulerRanks::AddressExchange::pmi:
      return exchange_detail::share_by_pmi(rank, text, deadline);
    case SchedulerRanks::AddressExchange::pmix:
      return exchange_detail::share_by_pmix(rank, text, deadline);
    case SchedulerRanks::AddressExchange::none: break;
  }
  return Status(Code::unsupported, "this launcher lets ranks share nothing");
}

}  // namespace muster::store
