package envoyquota

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"

	quotav3 "github.com/envoyproxy/go-control-plane/envoy/service/rate_limit_quota/v3"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/internal/fairshare"
	"github.com/weirlimit/weir/limit"
)

const (
	// maxBuckets bounds the buckets of a stream.
	maxBuckets = 10_000
	// What a bucket takes of Kept: bucketBytes for itself with its loans, pairBytes for each pair of its id, and the
	// length of its id's text three times, because the id, the name and the key each have it.
	bucketBytes, pairBytes = 2048, 96
)

// session is the stream of one data plane. One goroutine uses it.
type session struct {
	service *Service
	caller  string
	domain  string
	buckets map[string]*entry
}

// entry is a bucket with its id and the bytes that it has taken of Kept.
type entry struct {
	bucket
	id    *quotav3.BucketId
	bytes fairshare.Taken
	told  *usage // reported by the current message; nil: nothing
}

// errand is a task for a bucket, with the question for the owner.
type errand struct {
	task
	e   *entry
	ask limit.Quota
}

// errDomain is returned for a stream whose messages do not all name one domain.
var errDomain = &limit.Error{Kind: limit.Invalid, Field: "domain",
	Message: "must be in the first message, and the same in all"}

// close ends the session. The assignments of its data plane end by themselves, and their loans with them.
func (s *session) close() {
	for _, e := range s.buckets {
		s.service.cfg.Kept.Give(e.bytes)
	}
	s.service.count.buckets.Sub(float64(len(s.buckets)))
	s.buckets = nil
}

// handle processes a message and returns the response; nil: there is nothing to say.
func (s *session) handle(ctx context.Context,
	in *quotav3.RateLimitQuotaUsageReports) (*quotav3.RateLimitQuotaResponse, error) {
	s.domain = cmp.Or(s.domain, in.GetDomain())
	if s.domain == "" || in.GetDomain() != "" && in.GetDomain() != s.domain {
		return nil, errDomain
	}
	var order []*entry
	for _, r := range in.GetBucketQuotaUsages() {
		e := s.entry(r.GetBucketId())
		if e == nil {
			continue
		}
		if e.told == nil {
			e.told, order = new(usage), append(order, e)
		}
		// NumRequests fields are uint64; a count stops at MaxLimit. TimeElapsed is ignored, because it cannot be
		// trusted.
		e.told.allowed = min(e.told.allowed+saturate(r.GetNumRequestsAllowed()), algo.MaxLimit)
		e.told.denied = min(e.told.denied+saturate(r.GetNumRequestsDenied()), algo.MaxLimit)
	}
	return s.answer(ctx, order), nil
}

func saturate(n uint64) int64 { return int64(min(n, uint64(algo.MaxLimit))) }

// answer processes the reports of the buckets and asks the owners of their keys.
func (s *session) answer(ctx context.Context, order []*entry) *quotav3.RateLimitQuotaResponse {
	out := new(quotav3.RateLimitQuotaResponse)
	now := s.service.cfg.Now()
	var errands []errand
	var unassigned []limit.Check // all charged at once: an owner's answer is of use for askMost
	for _, e := range order {
		u := *e.told
		e.told = nil
		if excess := e.report(now, u); excess > 0 {
			unassigned = append(unassigned, limit.Check{Target: e.target, Cost: excess, Always: true})
		}
		s.service.count.allowed.Add(float64(u.allowed))
		s.service.count.denied.Add(float64(u.denied))
		for _, t := range e.tells() {
			errands = append(errands, errand{t, e, e.quota(t.l, now, false)})
		}
		told, l := e.ask(now)
		s.service.append(out, e.id, told)
		if l != nil {
			errands = append(errands, errand{task{b: &e.bucket, l: l, asks: true}, e, e.quota(l, now, true)})
		}
	}
	for some := range slices.Chunk(unassigned, limit.MaxBatch) {
		s.service.charge(ctx, some)
	}
	for some := range slices.Chunk(errands, limit.MaxBatch) {
		s.ask(ctx, out, some)
	}
	s.forget(order)
	if len(out.BucketAction) == 0 {
		return nil
	}
	return out
}

// ask has the owners answer errands, and adds what the data plane is told to out.
func (s *session) ask(ctx context.Context, out *quotav3.RateLimitQuotaResponse, errands []errand) {
	asks, answers := make([]limit.Quota, len(errands)), make([]limit.QuotaLent, len(errands))
	for i := range errands {
		asks[i] = errands[i].ask
	}
	within, cancel := context.WithTimeout(ctx, askMost)
	err := s.service.cfg.Quotas.Quota(within, asks, answers)
	cancel()
	now := s.service.cfg.Now()
	for i, one := range errands {
		a := &answers[i]
		if err != nil {
			*a = limit.QuotaLent{Err: err}
		}
		if a.Err != nil {
			s.service.failed(&asks[i].Target, a.Err)
		}
		s.service.append(out, one.e.id, one.answered(now, a))
	}
}

// unavailable says whether an error leaves open what the owner would have answered. The next report asks again then.
func unavailable(err error) bool {
	var e *limit.Error
	return !errors.As(err, &e) || e.Kind == limit.Unavailable
}

// entry returns the entry of a reported bucket, made if necessary; nil when no file describes it or there is no room
// for it.
func (s *session) entry(id *quotav3.BucketId) *entry {
	if !validID(id) {
		s.service.count.unmatched.Inc()
		return nil
	}
	name := string(appendID(nil, id))
	t, ok := s.service.cfg.Config().Quota(s.domain, id.GetBucket())
	if !ok {
		s.service.count.unmatched.Inc()
		return nil // a bucket that the files no longer describe keeps its assignment until that ends
	}
	e := s.buckets[name]
	if e == nil {
		bytes, ok := s.service.cfg.Kept.TakeAll(s.caller, bucketBytes+len(id.GetBucket())*pairBytes+3*len(name))
		if !ok || len(s.buckets) >= maxBuckets {
			s.service.cfg.Kept.Give(bytes)
			s.service.count.rejected.Inc()
			return nil
		}
		e = &entry{id: &quotav3.BucketId{Bucket: id.GetBucket()}, bytes: bytes} // without unknown fields of the message
		s.buckets[name] = e
		s.service.count.buckets.Inc()
	}
	if e.target.Policy != t.Policy || e.target.Key != t.Key {
		// The bucket's loans are of another key. They end by themselves.
		e.bucket = bucket{target: limit.Target{Policy: t.Policy, Key: t.Key}, borrower: rand.Uint64() | 1}
	}
	e.share = int64(t.Share)
	return e
}

// forget deletes the abandoned ones of the reported buckets. Others have not changed.
func (s *session) forget(order []*entry) {
	for _, e := range order {
		if e.done() {
			s.service.cfg.Kept.Give(e.bytes)
			s.service.count.buckets.Dec()
			delete(s.buckets, string(appendID(nil, e.id)))
		}
	}
}

// validID says whether a file could describe a bucket with this id.
func validID(id *quotav3.BucketId) bool {
	entries, bytes := id.GetBucket(), 0
	for k, v := range entries {
		bytes += len(k) + len(v)
	}
	return len(entries) > 0 && len(entries) <= envoy.MaxQuotaEntries && bytes <= envoy.MaxQuotaText
}

// appendID appends a text that is equal for equal ids only.
func appendID(dst []byte, id *quotav3.BucketId) []byte {
	entries := id.GetBucket()
	for _, k := range slices.Sorted(maps.Keys(entries)) {
		dst = append(binary.AppendUvarint(dst, uint64(len(k))), k...)
		dst = append(binary.AppendUvarint(dst, uint64(len(entries[k]))), entries[k]...)
	}
	return dst
}
