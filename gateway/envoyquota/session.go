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
	// maxBuckets is how many buckets of a stream are known at most.
	maxBuckets = 10_000
	// bucketBytes is what is kept of a bucket with its loans, and pairBytes what of each pair of its id besides the text, which is kept three
	// times: as the id, as a name and in the key.
	bucketBytes, pairBytes = 2048, 96
)

// session is one data plane.
type session struct {
	service *Service
	caller  string
	domain  string
	buckets map[string]*entry
}

// entry is a bucket with its id.
type entry struct {
	bucket
	id    *quotav3.BucketId
	bytes fairshare.Taken
	told  *usage // by the message that is being handled; nil: nothing
}

// errand is a task for a bucket, and what is asked.
type errand struct {
	task
	e   *entry
	ask limit.Quota
}

// errDomain is answered to a stream whose messages do not name one domain.
var errDomain = &limit.Error{Kind: limit.Invalid, Field: "domain", Message: "must be in the first message, and the same in all"}

// close ends the session. What its data plane has ends by itself, and is held until then.
func (s *session) close() {
	for _, e := range s.buckets {
		s.service.cfg.Kept.Give(e.bytes)
	}
	s.service.count.buckets.Sub(float64(len(s.buckets)))
	s.buckets = nil
}

// handle takes in a message, and returns the response to it; nil: there is nothing to say.
func (s *session) handle(ctx context.Context, in *quotav3.RateLimitQuotaUsageReports) (*quotav3.RateLimitQuotaResponse, error) {
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
		// Some count in uint64; nothing is counted beyond MaxLimit. The time that the data plane says has passed does not matter.
		e.told.allowed = min(e.told.allowed+saturate(r.GetNumRequestsAllowed()), algo.MaxLimit)
		e.told.denied = min(e.told.denied+saturate(r.GetNumRequestsDenied()), algo.MaxLimit)
	}
	return s.answer(ctx, order), nil
}

func saturate(n uint64) int64 { return int64(min(n, uint64(algo.MaxLimit))) }

// answer asks the owners of the buckets' keys.
func (s *session) answer(ctx context.Context, order []*entry) *quotav3.RateLimitQuotaResponse {
	out := new(quotav3.RateLimitQuotaResponse)
	now := s.service.cfg.Now()
	var errands []errand
	for _, e := range order {
		u := *e.told
		e.told = nil
		if excess := e.report(now, u); excess > 0 {
			s.service.charge(ctx, &e.target, excess)
		}
		s.service.count.allowed.Add(float64(u.allowed))
		s.service.count.denied.Add(float64(u.denied))
		for _, t := range e.tells(now) {
			errands = append(errands, errand{t, e, e.quota(t.l, now, false)})
		}
		told, l := e.ask(now)
		s.service.append(out, e.id, told)
		if l != nil {
			errands = append(errands, errand{task{b: &e.bucket, l: l, asks: true}, e, e.quota(l, now, true)})
		}
	}
	for some := range slices.Chunk(errands, limit.MaxBatch) {
		s.ask(ctx, out, some)
	}
	s.forget()
	if len(out.BucketAction) == 0 {
		return nil
	}
	return out
}

// ask carries out errands.
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

// unavailable reports whether an error says nothing about what was asked for, so that it may be asked for again.
func unavailable(err error) bool {
	var e *limit.Error
	return !errors.As(err, &e) || e.Kind == limit.Unavailable
}

// entry is a bucket that was reported; nil when it is not limited, or there is no place for it.
func (s *session) entry(id *quotav3.BucketId) *entry {
	if !validID(id) {
		s.service.count.unmatched.Inc()
		return nil
	}
	name := string(appendID(nil, id))
	t, ok := s.service.cfg.Config().Quota(s.domain, id.GetBucket())
	if !ok {
		s.service.count.unmatched.Inc()
		return nil // also when it was limited until the files changed: what it has ends
	}
	e := s.buckets[name]
	if e == nil {
		bytes, ok := s.service.cfg.Kept.TakeAll(s.caller, bucketBytes+len(id.GetBucket())*pairBytes+3*len(name))
		if !ok || len(s.buckets) >= maxBuckets {
			s.service.cfg.Kept.Give(bytes)
			s.service.count.rejected.Inc()
			return nil
		}
		e = &entry{id: &quotav3.BucketId{Bucket: id.GetBucket()}, bytes: bytes} // without what else a message may bring
		s.buckets[name] = e
		s.service.count.buckets.Inc()
	}
	if e.target.Policy != t.Policy || e.target.Key != t.Key {
		// What it had is of another key, and ends there by itself.
		e.bucket = bucket{target: limit.Target{Policy: t.Policy, Key: t.Key}, borrower: rand.Uint64() | 1}
	}
	e.share = int64(t.Share)
	return e
}

// forget drops buckets that were abandoned.
func (s *session) forget() {
	for name, e := range s.buckets {
		if e.done() {
			s.service.cfg.Kept.Give(e.bytes)
			s.service.count.buckets.Dec()
			delete(s.buckets, name)
		}
	}
}

// validID reports whether an id is one that a file could describe.
func validID(id *quotav3.BucketId) bool {
	entries, bytes := id.GetBucket(), 0
	for k, v := range entries {
		bytes += len(k) + len(v)
	}
	return len(entries) > 0 && len(entries) <= envoy.MaxQuotaEntries && bytes <= envoy.MaxQuotaText
}

// appendID appends what is the same for the same ids only.
func appendID(dst []byte, id *quotav3.BucketId) []byte {
	entries := id.GetBucket()
	for _, k := range slices.Sorted(maps.Keys(entries)) {
		dst = append(binary.AppendUvarint(dst, uint64(len(k))), k...)
		dst = append(binary.AppendUvarint(dst, uint64(len(entries[k]))), entries[k]...)
	}
	return dst
}
