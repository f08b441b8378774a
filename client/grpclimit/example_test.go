package grpclimit_test

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/weirlimit/weir/algo"
	"github.com/weirlimit/weir/client/grpclimit"
	"github.com/weirlimit/weir/client/local"
)

// Two calls a minute for each address. With a cluster, the client is one of client.Dial and the limit a policy.
func Example() {
	c := local.New(nil)
	defer c.Close()
	perMinute := c.Inline("api", algo.Limit{Algorithm: algo.SlidingLog, Limit: 2, Window: time.Minute})

	server := grpc.NewServer(grpc.UnaryInterceptor(grpclimit.New(grpclimit.Config{Limiter: perMinute}).Unary))
	healthv1.RegisterHealthServer(server, health.NewServer())
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	go server.Serve(lis)
	defer server.Stop()

	conn, err := grpc.NewClient(lis.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer conn.Close()
	for range 3 {
		_, err := healthv1.NewHealthClient(conn).Check(context.Background(), &healthv1.HealthCheckRequest{})
		fmt.Println(status.Code(err))
	}
	// Output:
	// OK
	// OK
	// ResourceExhausted
}
