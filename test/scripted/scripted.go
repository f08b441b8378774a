// Package scripted has the limit.Service that tests of gateways put in the place of a node.
package scripted

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/limiter"
)

// Call is one call that reached a Service.
type Call struct {
	Method  string
	Checks  []limit.Check
	Acquire limit.Acquire
	Reserve limit.Reserve
	Commit  limit.Commit
	Extend  limit.Extend
	Charge  limit.Charge

	Reserves []limit.Reserve
	Extends  []limit.Extend
	Commits  []limit.Commit

	Target limit.Target
	HeldID string // of a lease or a reservation
	TTL    time.Duration
	Units  int64
}

// Service is a limiter.BatchService that gives prepared answers and remembers what it was asked. The zero value answers
// with zeros. It is safe for concurrent use.
type Service struct {
	Results     []limit.Result        // of checks and ExtendEach; missing ones repeat the last
	Settlements []limit.SettledResult // of CommitEach
	All         limit.AllDecision
	Decision    limit.Decision
	Lives       time.Duration // of Renew
	Released    bool
	Refunded    int64
	Err         error // of every call

	mu    sync.Mutex
	calls []Call
}

// Calls are those so far.
func (s *Service) Calls() []Call {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// answer remembers a call, and returns its answer with the error of all.
func answer[A any](s *Service, c Call, a A) (A, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, c)
	return a, s.Err
}

func (s *Service) results(n int) []limit.Result {
	out := make([]limit.Result, n)
	for i := range out {
		if len(s.Results) > 0 {
			out[i] = s.Results[min(i, len(s.Results)-1)]
		}
	}
	return out
}

// The methods of limit.Service.

func (s *Service) Check(_ context.Context, checks []limit.Check) ([]limit.Result, error) {
	results, err := answer(s, Call{Method: "Check", Checks: slices.Clone(checks)}, s.results(len(checks)))
	if err != nil {
		return nil, err
	}
	return results, nil
}

func (s *Service) CheckAll(_ context.Context, checks []limit.Check) (limit.AllDecision, error) {
	return answer(s, Call{Method: "CheckAll", Checks: slices.Clone(checks)}, s.All)
}

func (s *Service) Acquire(_ context.Context, a limit.Acquire) (limit.Decision, error) {
	return answer(s, Call{Method: "Acquire", Acquire: a}, s.Decision)
}

func (s *Service) Renew(_ context.Context, t limit.Target, id string, ttl time.Duration) (time.Duration, error) {
	return answer(s, Call{Method: "Renew", Target: t, HeldID: id, TTL: ttl}, s.Lives)
}

func (s *Service) Release(_ context.Context, t limit.Target, id string) (bool, error) {
	return answer(s, Call{Method: "Release", Target: t, HeldID: id}, s.Released)
}

func (s *Service) Reserve(_ context.Context, r limit.Reserve) (limit.Decision, error) {
	return answer(s, Call{Method: "Reserve", Reserve: r}, s.Decision)
}

func (s *Service) ReserveAll(_ context.Context, rs []limit.Reserve) (limit.AllDecision, error) {
	return answer(s, Call{Method: "ReserveAll", Reserves: slices.Clone(rs)}, s.All)
}

func (s *Service) Extend(_ context.Context, e limit.Extend) (limit.Decision, error) {
	return answer(s, Call{Method: "Extend", Extend: e}, s.Decision)
}

func (s *Service) ExtendEach(_ context.Context, es []limit.Extend) ([]limit.Result, error) {
	return answer(s, Call{Method: "ExtendEach", Extends: slices.Clone(es)}, s.results(len(es)))
}

func (s *Service) Commit(_ context.Context, c limit.Commit) (limit.Settled, error) {
	return answer(s, Call{Method: "Commit", Commit: c}, limit.Settled{Refunded: s.Refunded})
}

func (s *Service) CommitEach(_ context.Context, cs []limit.Commit) ([]limit.SettledResult, error) {
	return answer(s, Call{Method: "CommitEach", Commits: slices.Clone(cs)}, s.Settlements)
}

func (s *Service) Cancel(_ context.Context, t limit.Target, id string) (int64, error) {
	return answer(s, Call{Method: "Cancel", Target: t, HeldID: id}, s.Refunded)
}

func (s *Service) Charge(_ context.Context, c limit.Charge) (limit.Decision, error) {
	return answer(s, Call{Method: "Charge", Charge: c}, s.Decision)
}

func (s *Service) Refund(_ context.Context, t limit.Target, units int64, _ string) (int64, error) {
	return answer(s, Call{Method: "Refund", Target: t, Units: units}, s.Refunded)
}

func (s *Service) Reset(_ context.Context, t limit.Target) error {
	_, err := answer(s, Call{Method: "Reset", Target: t}, 0)
	return err
}

// CheckTo implements limit.Preparer. What is denied is answered so, and is not among the Checks of the Call.
func (s *Service) CheckTo(ctx context.Context, checks []limit.Check, denied limit.Denials,
	results []limit.Result) error {
	var asked []limit.Check
	var places []int
	for i := range checks {
		if results[i] = (limit.Result{}); denied[i] != nil {
			results[i].Err = denied[i]
		} else {
			asked, places = append(asked, checks[i]), append(places, i)
		}
	}
	got, err := s.Check(ctx, asked)
	for j := range got {
		results[places[j]] = got[j]
	}
	return err
}

// Begin implements limiter.BatchService: everything is decided at once.
func (s *Service) Begin(ctx context.Context, b *limiter.Batch) ([]int, *limit.Error) {
	var err error
	b.Results, err = s.Check(ctx, b.Checks)
	if e, ok := errors.AsType[*limit.Error](err); ok {
		return nil, e
	}
	return nil, nil
}

// Finish implements limiter.BatchService.
func (*Service) Finish(context.Context, *limiter.Batch, []int) {}
