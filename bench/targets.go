package main

// A target is one line of what Weir is to reach: a figure of one series against one of another in the same round, or,
// without a base, against nothing but the bound.
type target struct {
	work          string // in the words of the project's list
	subject, base string // names of measurements
	figure        metric
	bound         float64
	atLeast       bool // the ratio must be at least bound; otherwise at most
}

// targets are the project's list. A line of it with several conditions is several here.
func targets() []target {
	const (
		least = true
		most  = false
	)
	t := []target{
		{"one node, unary, 1 check a call, 256 callers", "unary/weir", "unary/echo", rate, 0.90, least},
		{"one node, unary, 1 check a call, 256 callers", "unary/weir", "unary/echo", serverCPU, 1.2, most},
		{"one node, unary, 1 check a call, 256 callers", "unary/weir", "unary/gubernator", rate, 2, least},
		{"one node, unary, 100 checks a call, 32 callers", "batch/weir", "batch/echo", rate, 0.75, least},
		{"one node, unary, 100 checks a call, 32 callers", "batch/weir", "batch/echo", serverCPU, 1.5, most},
		{"one node, unary, 100 checks a call, 32 callers", "batch/weir", "batch/gubernator", rate, 8, least},
		{"Gubernator's client, 1 request a call, 256 callers", "unary/weir-v1", "unary/gubernator", rate, 1.5, least},
		{"Gubernator's client, 100 requests a call, 32 callers", "batch/weir-v1", "batch/gubernator", rate, 4, least},
		{"Go client, 256 goroutines, one check at a time", "client/weir", "unary/gubernator", rate, 10, least},
		{"Go client, sliding log, against the Redis script", "client/weir-log", "client/redis-script", rate, 5, least},
		{"Go client, 256 goroutines, one check at a time", "client/weir", "stream/echo", rate, 1, least},
		{"three nodes, random entry, unary, 256 callers", "three-unary/weir", "three-unary/forward-echo", rate, 1.2, least},
		{"three nodes, random entry, unary, 256 callers", "three-unary/weir", "three-unary/forward-echo", serverCPU, 0.8, most},
		{"three nodes, random entry, unary, 256 callers", "three-unary/weir", "three-unary/gubernator", rate, 2, least},
		{"three nodes, Go client: decisions per CPU second, against one node", "three-client/weir", "client/weir", perCPU, 0.8, least},
		{"single caller, forwarded", "single/weir", "single/forward-echo", p50, 1.2, most},
		{"HTTP /v1/check, 256 connections", "http/weir", "http/echo", rate, 0.7, least},
		{"HTTP /v1/forward-auth, 256 connections", "forward-auth/weir", "forward-auth/echo", rate, 0.7, least},
		{"Redis protocol, 100 commands at a time, CL.THROTTLE", "resp/weir-throttle", "resp/redis-script", rate, 5, least},
		{"Redis protocol, 100 commands at a time, CL.THROTTLE", "resp/weir-throttle", "resp/redis-ping", rate, 0.5, least},
		{"Redis protocol, 100 commands at a time, WEIR.CHECK", "resp/weir-check", "resp/redis-script", rate, 5, least},
		{"Redis protocol, 100 commands at a time, WEIR.CHECK", "resp/weir-check", "resp/redis-ping", rate, 0.5, least},
		{"Envoy's rate limit service, unary, 256 callers", "envoy/weir", "envoy/echo", rate, 0.85, least},
		{"Kuadrant's CheckRateLimit, unary, 256 callers", "kuadrant-check/weir", "kuadrant-check/echo", rate, 0.85, least},
		{"in-process Allow, 1 M string keys, 1 thread", "in-process/weir-local", "in-process/bare-string", nsOne, 1.15, most},
		{"in-process Allow, 1 M string keys, 2 threads", "in-process/weir-local", "in-process/bare-string", nsTwo, 1.15, most},
	}
	for _, library := range []string{"x-time-rate", "go-limiter"} {
		for _, in := range []struct {
			work   string
			figure metric
		}{
			{"in-process Allow, 1 M string keys, 1 thread", nsOne}, {"in-process Allow, 1 M string keys, 2 threads", nsTwo},
			{"in-process Allow, one hot key, 1 thread", nsHotOne}, {"in-process Allow, one hot key, 2 threads", nsHotTwo},
		} {
			t = append(t, target{in.work, "in-process/weir-local", "in-process/" + library, in.figure, 1, most})
		}
	}
	t = append(t, loanTargets()...)
	t = append(t, ownershipTargets()...)
	return append(t,
		target{"memory, 1 M keys, token bucket", "in-process/weir-local", "in-process/bare-string", bytesPerKey, 1.2, most},
		target{"garbage collection, 1 M keys, against the map without pointers", "in-process/weir-local", "in-process/bare-hashed", gcMillis, 2, most},
		target{"full sliding log of 1 M, bytes an admission", "full-log/weir", "", logBytes, 4.2, most},
		// The project says "flat": held here to half as much again, for a log that no longer fits the CPU's caches.
		target{"sliding log, slowest of 10 to 1 M entries by the one at 10", "full-log/weir", "", logSpread, 1.5, most},
		target{"one hot key, 3 nodes, far over its limit, Go client", "hot-client/weir-refused", "hot-client/weir-admitted", rate, 5, least},
		target{"one hot key, 3 nodes, far over its limit, unary", "hot-unary/weir-refused", "hot-unary/weir-admitted", rate, 5, least},
		target{"overload, 32 callers × 1000 checks, 3 nodes: failed calls", "overload/weir", "", failed, 0, most},
		target{"5,000 connections of strangers: bytes of memory", "strangers/weir", "", strangersBytes, strangersMost, most},
		target{"5,000 connections of strangers: decisions by those without them", "strangers/weir", "", strangersRate, strangersShare, least},
		target{"overload: peak memory by (2 × idle + in flight)", "overload/weir", "", overBound, 1, most},
	)
}

// An outcome is a target and what was measured.
type outcome struct {
	Work    string  `json:"work"`
	Figure  metric  `json:"figure"`
	Subject string  `json:"subject"`
	Base    string  `json:"base,omitempty"`
	Bound   float64 `json:"bound"`
	AtLeast bool    `json:"at_least"`
	// Ratio is missing when one of the two was not measured.
	Ratio *spread `json:"ratio,omitempty"`
	// Result is "pass" or "short", by the median, or "not measured".
	Result string `json:"result"`
}

// judge holds the series to the targets.
func judge(all []*series, ts []target) []outcome {
	byName := make(map[string]*series)
	for _, s := range all {
		byName[s.work+"/"+s.system] = s
	}
	var out []outcome
	for _, t := range ts {
		o := outcome{Work: t.work, Figure: t.figure, Subject: t.subject, Base: t.base, Bound: t.bound, AtLeast: t.atLeast, Result: "not measured"}
		var got spread
		ok := false
		if s := byName[t.subject]; s != nil {
			if t.base == "" {
				got, ok = s.of(t.figure)
			} else if base := byName[t.base]; base != nil {
				got, ok = s.ratioTo(base, t.figure, t.figure)
			}
		}
		if ok {
			o.Ratio, o.Result = &got, "short"
			if t.atLeast && got.Median >= t.bound || !t.atLeast && got.Median <= t.bound {
				o.Result = "pass"
			}
		}
		out = append(out, o)
	}
	return out
}
