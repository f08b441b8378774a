package gubernator

import (
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	pb "github.com/weirlimit/weir/gateway/gubernator/gubernatorpb"

	"github.com/weirlimit/weir/test/must"
)

// BenchmarkGetRateLimits decides calls of 100 requests, decoding and encoding included.
func BenchmarkGetRateLimits(b *testing.B) {
	server := newBench(b)
	in := new(pb.GetRateLimitsReq)
	for i := range 100 {
		in.Requests = append(in.Requests, &pb.RateLimitReq{Name: "bucket", UniqueKey: fmt.Sprintf("account:%d", i), Hits: 1, Limit: 1000, Duration: 60_000})
	}
	data, err := proto.Marshal(in)
	must.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		in := new(pb.GetRateLimitsReq)
		if err := proto.Unmarshal(data, in); err != nil {
			b.Fatal(err)
		}
		out, err := server.GetRateLimits(b.Context(), in)
		must.NoError(b, err)
		_, err = proto.Marshal(out)
		must.NoError(b, err)
	}
}
