package gubernator

import (
	"strconv"
	"time"

	"github.com/weirlimit/weir/algo"
	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"
	"github.com/weirlimit/weir/limit"
	"github.com/weirlimit/weir/ring"
)

// rule is the limit of a request. It never changes.
type rule struct {
	limit     algo.Limit // Period: of a token bucket with a calendar interval, in UTC
	namespace string
	hash      ring.Scope // only for callers who may know owners
	beyond    int64      // units of limit or burst above algo.MaxLimit
	zero      bool       // admits no hits; limit is of 1
	momentary bool       // the window has no length; that of limit has a millisecond
}

// intervals are the calendar intervals by the value of duration under DURATION_IS_GREGORIAN.
var intervals = [...]algo.Period{algo.Minute, algo.Hour, algo.Day, algo.Week, algo.Month, algo.Year}

// around returns the length of the interval around t, and its last millisecond since 1970.
func around(period algo.Period, t time.Time) (length time.Duration, last int64) {
	start, end := period.Around(t)
	return end.Sub(start), end.UnixMilli() - 1
}

// ruleKey has everything of a request that determines its rule.
type ruleKey struct {
	name                   string
	limit, duration, burst int64
	algorithm              pb.Algorithm
	gregorian              bool
	length                 time.Duration // of the current interval, for a leaky bucket
}

// maxName bounds a name, in bytes.
const maxName = limit.MaxNamespace - len(limit.GubernatorNamespace)

// ruleOf returns the rule of a request, or says what is wrong with the request. It keeps the last rule, because the
// requests of a call are mostly alike.
func (c *call) ruleOf(in *pb.RateLimitReq) (_ *rule, wrong string) {
	switch {
	case in.GetUniqueKey() == "":
		return nil, "field 'unique_key' cannot be empty"
	case in.GetName() == "":
		return nil, "field 'namespace' cannot be empty" // Gubernator's text, which says namespace for name
	case len(in.GetName()) > maxName:
		return nil, "field 'name' has " + strconv.Itoa(len(in.GetName())) + " bytes, at most " + strconv.Itoa(maxName) +
			" are taken"
	}
	k := ruleKey{in.GetName(), in.GetLimit(), in.GetDuration(), in.GetBurst(), in.GetAlgorithm(),
		has(in, pb.Behavior_DURATION_IS_GREGORIAN), 0}
	switch k.algorithm {
	case pb.Algorithm_TOKEN_BUCKET:
		k.burst = 0
	case pb.Algorithm_LEAKY_BUCKET:
		if k.gregorian && k.duration >= 0 && k.duration < int64(len(intervals)) {
			k.length, _ = around(intervals[k.duration], c.now)
		}
	default:
		return nil, "invalid rate limit algorithm '" + strconv.Itoa(int(k.algorithm)) + "'"
	}
	if c.last != nil && k == c.lastKey {
		return c.last, ""
	}
	made, wrong := k.rule()
	if wrong != "" {
		return nil, wrong
	}
	made.namespace = limit.GubernatorNamespace + k.name
	if c.owns != nil {
		made.hash = c.s.cfg.HashKey.Scope(limit.InlineScope(made.namespace, &made.limit))
	}
	c.last, c.lastKey = made, k
	return made, ""
}

// rule makes the rule, or says what is wrong with the request.
func (k *ruleKey) rule() (_ *rule, wrong string) {
	made := &rule{limit: algo.Limit{Algorithm: algo.FixedWindow}}
	leaky := k.algorithm == pb.Algorithm_LEAKY_BUCKET
	l := &made.limit
	l.Limit, made.beyond = counted(k.limit)
	l.Limit, made.zero = max(l.Limit, 1), l.Limit == 0
	switch {
	case !k.gregorian && k.duration > int64(algo.MaxWindow/time.Millisecond):
		return nil, "field 'duration' cannot be longer than " +
			strconv.FormatInt(int64(algo.MaxWindow/time.Millisecond), 10) + " milliseconds (366 days)"
	case !k.gregorian:
		l.Window = time.Duration(max(k.duration, 1)) * time.Millisecond
		made.momentary = k.duration <= 0
	case k.duration < 0 || k.duration >= int64(len(intervals)):
		return nil, "behavior DURATION_IS_GREGORIAN is set; but `Duration` is not a valid gregorian interval"
	case leaky:
		l.Window = k.length
	default:
		l.Period = intervals[k.duration]
	}
	if !leaky {
		return made, ""
	}
	l.Algorithm = algo.TokenBucket
	switch {
	case k.burst < 0:
		return nil, "field 'burst' cannot be negative"
	case k.burst > 0 && made.zero:
		return nil, "field 'limit' cannot be 0 beside a 'burst', which would never come back"
	case k.burst > 0 && !made.momentary:
		l.Capacity, made.beyond = counted(k.burst)
	}
	if err := l.Validate(); err != nil { // all other fields are valid here
		return nil, "field 'burst' takes too long to come back at this rate"
	}
	return made, ""
}

// counted splits a limit into the part that Weir can count and the rest.
func counted(n int64) (most, beyond int64) {
	most = max(min(n, algo.MaxLimit), 0)
	return most, max(n, 0) - most
}
