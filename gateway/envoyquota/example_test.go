package envoyquota

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/rate_limit_quota/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"go.yaml.in/yaml/v4"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protopath"
	"google.golang.org/protobuf/reflect/protorange"

	"github.com/weirlimit/weir/gateway/envoy"
	"github.com/weirlimit/weir/policy"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

const exampleDir = "../../deploy/examples/envoy"

// messages calls f with each message in m, those packed in others too, after it was validated as Envoy does.
func messages(t *testing.T, m proto.Message, f func(proto.Message)) {
	t.Helper()
	f(m)
	err := m.(interface{ ValidateAll() error }).ValidateAll()
	expect.NoError(t, err, "%s", m.ProtoReflect().Descriptor().FullName())
	expect.NoError(t, protorange.Range(m.ProtoReflect(), func(p protopath.Values) error {
		last := p.Index(-1)
		if last.Step.Kind() == protopath.AnyExpandStep {
			messages(t, last.Value.Message().Interface(), f)
			return protorange.Break
		}
		return nil
	}))
}

// TestExample holds the example of Envoy's configuration to the types of its API, to what Weir must have Envoy do
// without an assignment, and to Weir's own files beside it.
func TestExample(t *testing.T) {
	read := func(name string) []byte {
		t.Helper()
		return must.Value(os.ReadFile(filepath.Join(exampleDir, name)))(t)
	}
	var any any
	must.NoError(t, yaml.Unmarshal(read("envoy.yaml"), &any))
	data := must.Value(json.Marshal(any))(t)
	bootstrap := new(bootstrapv3.Bootstrap)
	must.NoError(t, protojson.Unmarshal(data, bootstrap))
	set := must.Value(policy.Parse("policies.yaml", read("policies.yaml")))(t)
	files, err := envoy.Parse([]envoy.File{{Name: "edge.yaml", Data: read("weir/edge.yaml")}}, envoy.Options{})
	must.NoError(t, err)
	clusters := make(map[string]bool)
	for _, c := range bootstrap.GetStaticResources().GetClusters() {
		clusters[c.GetName()] = true
	}
	var domain string
	var last string // of the filters
	buckets := 0
	messages(t, bootstrap, func(m proto.Message) {
		switch m := m.(type) {
		case *hcmv3.HttpConnectionManager:
			last = m.HttpFilters[len(m.HttpFilters)-1].GetName()
		case *filterv3.RateLimitQuotaFilterConfig:
			if domain = m.GetDomain(); !clusters[m.GetRlqsServer().GetEnvoyGrpc().GetClusterName()] {
				t.Errorf("asks %v, which there is not", m.GetRlqsServer())
			}
		case *filterv3.RateLimitQuotaBucketSettings:
			buckets++
			id := make(map[string]string)
			for k, v := range m.GetBucketIdBuilder().GetBucketIdBuilder() {
				if id[k] = v.GetStringValue(); v.GetCustomValue() == nil {
					continue
				}
				var header matcherv3.HttpRequestHeaderMatchInput
				expect.NoError(t, v.GetCustomValue().GetTypedConfig().UnmarshalTo(&header))
				id[k] = "of " + header.GetHeaderName()
			}
			q, ok := files.Quota(domain, id)
			p, known := set.Get(q.Policy)
			if !ok || !known {
				t.Errorf("%v is no bucket of the domain %s", id, domain)
				return
			}
			expect.NoError(t, p.Divisible())
			for _, r := range p.Rules() {
				expect.NoError(t, r.Limits.Quotable())
			}
			expect.True(t, m.GetReportingInterval().AsDuration() == period,
				"%v: reports every %v", id, m.GetReportingInterval().AsDuration())
			const denies = typev3.RateLimitStrategy_DENY_ALL
			none, expired := m.GetNoAssignmentBehavior().GetFallbackRateLimit(),
				m.GetExpiredAssignmentBehavior().GetFallbackRateLimit()
			for _, s := range []*typev3.RateLimitStrategy{none, expired} {
				rule, is := s.GetStrategy().(*typev3.RateLimitStrategy_BlanketRule_)
				expect.True(t, is && rule.BlanketRule == denies, "%v: %v without an assignment", id, s)
			}
		}
	})
	expect.True(t, buckets == 2 && files.Quotas() == 2 && last == "envoy.filters.http.router",
		"%d buckets of %d, and %s is the last filter", buckets, files.Quotas(), last)
}
