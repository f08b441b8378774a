// Command gubernatorclient asks an address with Gubernator's own Go client, for tests: each line of standard input is a
// GetRateLimitsReq in JSON, and each line of standard output what came of it, a GetRateLimitsResp in JSON or {"failed":
// "…"}. First it writes the answer of HealthCheck.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"

	"github.com/gubernator-io/gubernator/v2"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: gubernatorclient ADDRESS")
	}
	client, err := gubernator.DialV1Server(os.Args[1], nil)
	if err != nil {
		log.Fatal(err)
	}
	health, err := client.HealthCheck(context.Background(), &gubernator.HealthCheckReq{})
	write(health, err)
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 4<<20)
	for in.Scan() {
		req := new(gubernator.GetRateLimitsReq)
		if err := protojson.Unmarshal(in.Bytes(), req); err != nil {
			log.Fatal(err)
		}
		resp, err := client.GetRateLimits(context.Background(), req)
		write(resp, err)
	}
	if err := in.Err(); err != nil {
		log.Fatal(err)
	}
}

func write(m proto.Message, err error) {
	var line []byte
	if err == nil {
		line, err = protojson.Marshal(m)
	}
	if err != nil {
		line, _ = json.Marshal(map[string]string{"failed": err.Error()}) // a string
	}
	fmt.Printf("%s\n", line)
}
